"""Pictures of attention and of the logit lens, for sentences that nobody has prepared."""
from xml.etree import ElementTree

import numpy as np
import pytest

from tinymlir import pictures
from tinymlir.checkpoint import BUNDLED
from tinymlir.model import PLAIN, Model, load_model

SENTENCES = ["Once", "The king had a daughter.", '"<b>Königin</b>" & 5 > 3\n\tend', "猫 😀"]


@pytest.fixture(scope="module", params=SENTENCES)
def seen(request):
    model, tokenizer = load_model(BUNDLED)
    ids, residuals = tokenizer.encode(request.param).ids, {}
    model(ids, trace=residuals)
    tokens = [tokenizer.decode([i]) for i in ids]
    return model, tokens, ids, residuals


def by_numpy(model, residuals):
    """The weights of all heads, from NumPy and the formula of chapter 5."""
    x, heads, found = residuals["embedding"], model.config.heads, []
    for i, block in enumerate(model.params.blocks):
        centred = x - x.mean(-1, keepdims=True)
        normed = block.norm_1.gain * centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        q, k, _ = np.split((normed + block.norm_1.bias) @ block.qkv.weight + block.qkv.bias, 3, -1)
        q, k = (np.stack(np.split(part, heads, -1)) for part in (q, k))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        scores[:, ~np.tri(len(x), dtype=bool)] = -np.inf
        powers = np.exp(scores - scores.max(-1, keepdims=True))
        found.append(powers / powers.sum(-1, keepdims=True))
        x = residuals[f"block {i} feed-forward"]
    return np.stack(found)


def test_weights(seen):
    model, _, _, residuals = seen
    weights = pictures.all_weights(model, residuals)
    np.testing.assert_allclose(weights, by_numpy(model, residuals), atol=1e-5)


def test_the_last_block_says_what_the_model_says(seen):
    model, _, ids, residuals = seen
    best, sure = pictures.read_lens(model, residuals)
    logits = Model(model.config, model.params, PLAIN)(ids)[0]
    assert best[-1, -1] == logits.argmax()
    odds = np.exp(logits - logits.max())
    np.testing.assert_allclose(sure[-1, -1], odds.max() / odds.sum(), atol=1e-5)
    assert best.shape == sure.shape == (model.config.blocks + 1, len(ids))


def test_pictures_are_sound(seen):
    model, tokens, _, residuals = seen
    weights = pictures.all_weights(model, residuals)
    best, sure = pictures.read_lens(model, residuals)
    said = [[f"<{i}>" for i in row] for row in best]
    for picture in (pictures.draw_heads(weights), pictures.draw_head(weights[0, 0], tokens),
                    pictures.draw_lens(said, sure, tokens)):
        root = ElementTree.fromstring(picture._repr_html_())
        assert root.get("role") == "img" and len(root.get("aria-label")) > 20
        width, height = (float(n) for n in root.get("viewBox").split()[2:])
        for text in root.iter("{http://www.w3.org/2000/svg}text"):
            assert 0 <= float(text.get("x")) <= width and 0 <= float(text.get("y")) <= height


def test_shades():
    table = np.array([[0, 1], [0.5, 0.004]])
    drawn = pictures.squares(table, 10, 20, 5)
    assert drawn.count("<path") == 2
    assert 'fill-opacity="1" d="M15 20h5v5h-5z"' in drawn
    assert 'fill-opacity="0.5" d="M10 25h5v5h-5z"' in drawn
