"""A Pygments lexer for MLIR, in one screen."""
from pygments.lexer import RegexLexer, bygroups
from pygments.token import (
    Comment,
    Keyword,
    Name,
    Number,
    Operator,
    Punctuation,
    String,
    Text,
    Whitespace,
)

WORD = r"[A-Za-z_][\w$]*"
TYPES = r"[su]?i\d+|f\d+\w*|bf16|tf32|index|none|tensor|memref|vector|complex|tuple|strided"
ATTRIBUTES = (r"true|false|unit|dense|loc|affine_map|affine_set|attributes|to|step|ins|outs"
              r"|iter_args|else|do")


class MLIRLexer(RegexLexer):
    """Values, symbols, operations, types and numbers; no part of the text is an error."""

    name, aliases, filenames = "MLIR", ["mlir"], ["*.mlir"]
    tokens = {
        "root": [
            (r"\s+", Whitespace),
            (r"//.*", Comment.Single),
            (r'"(?:[^"\\]|\\.)*"', String),
            (r"%[\w$.-]+(?:[:#]\d+)?", Name.Variable),
            (r'@(?:"(?:[^"\\]|\\.)*"|[\w$.]+)', Name.Function),
            (r"\^[\w$.-]+", Name.Label),
            (r"[!#][\w$.]+", Name.Decorator),
            (rf"({WORD})(\.)({WORD}(?:\.{WORD})*)",  # dialect.operation
             bygroups(Name.Namespace, Punctuation, Name.Builtin)),
            (r"0x[0-9A-Fa-f]+", Number.Hex),
            (r"(\d+|\?)(x)(?=[\d?a-z\[!])", bygroups(Number.Integer, Punctuation)),  # 4x?x
            (r"-?\d+\.\d*(?:[eE][-+]?\d+)?", Number.Float),
            (r"-?\d+(?!x)", Number.Integer),
            (rf"\b(?:{TYPES})\b", Keyword.Type),
            (rf"\b(?:{ATTRIBUTES})\b", Keyword.Constant),
            (r"\b(?:module|return|private|public)\b", Keyword),
            (WORD, Name),
            (r"->|==|>=|<=|::", Operator),
            (r"[-+*/=?&|~$;]", Operator),
            (r"[()\[\]{}<>,:.#%!^@]", Punctuation),
            (r".", Text),
        ],
    }
