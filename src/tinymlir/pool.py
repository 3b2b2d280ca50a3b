# Tangled from notebooks/04_jit.md: edit the chapter, not this file.

# %% 04_jit.md § Memory that stays (1)
"""Memory for compiled code, kept between calls (chapter 4)."""
from __future__ import annotations

import threading
from functools import cache

from tinymlir import native, store

PLACES, LARGE, LIMIT = 32, 1 << 16, 256 << 20  # bytes; smaller pieces are not kept
TRIES = 200  # to get the flag


def flag(before: str, otherwise: str) -> str:
    """Coming from block `before`: to %scan with the flag set, or to `otherwise`."""
    return f"""try:
  %tried = phi i64 [ 0, %{before} ], [ %again, %wait ]
  %old = cmpxchg ptr @busy, i8 0, i8 1 acquire monotonic
  %mine = extractvalue {{ i8, i1 }} %old, 1
  br i1 %mine, label %scan, label %wait
wait:
  %again = add i64 %tried, 1
  %patient = icmp ult i64 %again, {TRIES}
  br i1 %patient, label %try, label %{otherwise}"""


TAKE = f"""
%place = type {{ ptr, i64 }}
@table = internal global [{PLACES} x %place] zeroinitializer
@held = internal global i64 0
@turn = internal global i64 0
@busy = internal global i8 0
declare ptr @malloc(i64)
declare void @free(ptr)

define ptr @take(i64 %n) {{
entry:
  %large = icmp uge i64 %n, {LARGE}
  br i1 %large, label %try, label %fresh
{flag("entry", "fresh")}
scan:
  %i = phi i64 [ 0, %try ], [ %next, %miss ]
  %at = getelementptr %place, ptr @table, i64 %i
  %there = getelementptr %place, ptr %at, i64 0, i32 1
  %size = load i64, ptr %there
  %same = icmp eq i64 %size, %n
  br i1 %same, label %hit, label %miss
miss:
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, {PLACES}
  br i1 %more, label %scan, label %none
hit:
  %piece = load ptr, ptr %at
  store i64 0, ptr %there
  %held = load i64, ptr @held
  %less = sub i64 %held, %n
  store i64 %less, ptr @held
  store atomic i8 0, ptr @busy release, align 1
  ret ptr %piece
none:
  store atomic i8 0, ptr @busy release, align 1
  br label %fresh
fresh:
  %all = add i64 %n, 64
  %got = call ptr @malloc(i64 %all)
  %null = icmp eq ptr %got, null
  br i1 %null, label %fail, label %mark
mark:
  store i64 %n, ptr %got
  %new = getelementptr i8, ptr %got, i64 64
  ret ptr %new
fail:
  ret ptr null
}}
"""


# %% 04_jit.md § Memory that stays (2)
GIVE = f"""
define void @give(ptr %piece) {{
  %null = icmp eq ptr %piece, null
  br i1 %null, label %end, label %look
look:
  %start = getelementptr i8, ptr %piece, i64 -64
  %n = load i64, ptr %start
  %large = icmp uge i64 %n, {LARGE}
  %fits = icmp ule i64 %n, {LIMIT}
  %keep = and i1 %large, %fits
  br i1 %keep, label %try, label %drop
{flag("look", "drop")}
scan:
  %i = phi i64 [ 0, %try ], [ %next, %taken ], [ 0, %out ]
  %at = getelementptr %place, ptr @table, i64 %i
  %there = getelementptr %place, ptr %at, i64 0, i32 1
  %size = load i64, ptr %there
  %empty = icmp eq i64 %size, 0
  br i1 %empty, label %room, label %taken
taken:
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, {PLACES}
  br i1 %more, label %scan, label %evict
room:
  %held = load i64, ptr @held
  %sum = add i64 %held, %n
  %over = icmp ugt i64 %sum, {LIMIT}
  br i1 %over, label %evict, label %put
evict:
  %turn = load i64, ptr @turn
  %following = add i64 %turn, 1
  %round = urem i64 %following, {PLACES}
  store i64 %round, ptr @turn
  %chosen = getelementptr %place, ptr @table, i64 %turn
  %length = getelementptr %place, ptr %chosen, i64 0, i32 1
  %many = load i64, ptr %length
  %nothing = icmp eq i64 %many, 0
  br i1 %nothing, label %evict, label %out
out:
  %other = load ptr, ptr %chosen
  %begin = getelementptr i8, ptr %other, i64 -64
  call void @free(ptr %begin)
  store i64 0, ptr %length
  %was = load i64, ptr @held
  %is = sub i64 %was, %many
  store i64 %is, ptr @held
  br label %scan
put:
  store ptr %piece, ptr %at
  store i64 %n, ptr %there
  store i64 %sum, ptr @held
  store atomic i8 0, ptr @busy release, align 1
  ret void
drop:
  call void @free(ptr %start)
  ret void
end:
  ret void
}}
"""


lock = threading.Lock()


def code() -> native.Code:
    """The pool of this process."""
    with lock:  # two threads that load code at once have to get the same pool
        return load_code()


@cache
def load_code() -> native.Code:
    text = TAKE + GIVE
    key = store.key_of(text)
    kept = store.read(key)
    if kept is None:
        kept = [], native.generate(text)
        store.write(key, *kept)
    return native.Code(kept[1])


def symbols() -> dict[str, int]:
    """What compiled code calls, when it says `malloc` and `free`."""
    return {"malloc": code().address("take"), "free": code().address("give")}
