"""Each test tries to break one promise of stages/tokenizer.py or stages/stand_in_hub.py."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from stages import tokenizer as tokenization
from stages.stand_in_hub import TOKEN, StandInHub
from stages.tokenizer import END, PAD, PATTERNS, BulkEncoder
from utils.assets import asset
from utils.errors import ROOT, CourseError

SOURCES = [
    path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "utils").glob("*.py"))
]


def hostile_texts(megabytes: float) -> dict[str, str]:
    """Texts that break careless tokenizers, by name; the last is one line of so many megabytes."""
    draw = random.Random(42)
    noise = draw.randbytes(50_000)
    points = [*range(0xD800), *range(0xE000, 0x110000)]
    emoji = "👩‍👩‍👧‍👦 🏳️‍🌈 🇰🇷🇷🇴 1️⃣ 👍🏽 "
    accents = "Z̸̧̢̛͖̪̈́a̴l̵ e\u0301é שָׁלוֹם السَّلَام "
    newlines = "a\r\nb\rc\n\r\n\t \u2028\u2029\x85\x0b\x0c\u3000\xa0\u200b"
    return {
        "random bytes": noise.decode("latin-1") + noise.decode("utf-8", "replace"),
        "every code point of Unicode": "".join(map(chr, points)),
        "random code points": "".join(map(chr, draw.choices(points, k=20_000))),
        "emoji sequences, accents, right to left": (emoji + accents) * 200,
        "mixed newlines and blanks": newlines * 100,
        "NUL, control bytes, byte order mark": "".join(map(chr, range(32)))
        + "\ufeff\ufffe\uffff",
        "special tokens, letters of bytes": f"{END}{PAD} {END} <|endof{END}text|>\n{PAD} ĠĊ Ġdef",
        "blanks without end": " " * 200_000 + "x" + "\n" * 200_000 + "\t" * 200_000,
        "one word without end": "a" * 200_000 + "é" * 50_000 + "=" * 200_000,
        "one line without end": "x = [1, 'a'] ; " * int(megabytes * 1e6 / 15),
    }


@pytest.fixture(scope="module", params=list(PATTERNS))
def trained(request):
    """A small tokenizer for each pattern, trained on this repository."""
    return tokenization.train_bpe(SOURCES, 1024, PATTERNS[request.param])


def test_the_size_is_what_was_asked_and_the_specials_are_real(trained):
    assert len(trained) == 1024
    assert (trained.eos_token, trained.pad_token) == (END, PAD)
    assert trained.convert_tokens_to_ids([END, PAD]) == [1022, 1023]


def test_three_programs_give_the_same_ids_on_hostile_text(trained):
    encode = BulkEncoder(trained)
    hostile = hostile_texts(megabytes=0.1)
    for name, text in {**hostile, **dict(enumerate(SOURCES))}.items():
        text = text[:60_000]
        assert encode.encode(text).tolist() == trained(text)["input_ids"], name


def test_every_code_point_is_cut_alike_by_both_engines():
    """The two regular-expression engines carry their own Unicode tables: they must agree."""
    tokenizer = tokenization.train_bpe(SOURCES, 600)
    assigned = [*range(0xD800), *range(0xE000, 0x34000), *range(0xE0000, 0xE1000)]
    points = assigned + list(range(0x34000, 0x110000, 101))
    texts = [
        "".join(f"a{chr(p)}1 {chr(p)}." for p in points[i : i + 2000])
        for i in range(0, len(points), 2000)
    ]
    assert [ids.tolist() for ids in BulkEncoder(tokenizer)(texts)] == tokenizer(
        texts
    )["input_ids"]


def test_everything_comes_back():
    tokenizer = tokenization.train_bpe(SOURCES, 1024)
    encode = BulkEncoder(tokenizer)
    for name, text in hostile_texts(megabytes=10).items():
        assert encode.decode(encode.encode(text)) == text, name
        assert tokenizer.decode(encode.encode(text[:30_000])) == text[:30_000], name


@settings(deadline=None)
@given(st.text())
def test_any_text_comes_back_with_the_librarys_ids(trained, text):
    encode = BulkEncoder(trained, threads=1)
    ids = encode.encode(text)
    assert ids.tolist() == trained(text)["input_ids"]
    assert encode.decode(ids) == text


@pytest.mark.parametrize("name", ["nanochat", "code"])
def test_a_prompt_is_cut_as_its_file_unless_a_blank_line_comes_next(name):
    encode = BulkEncoder(
        tokenization.train_bpe(SOURCES, 600, PATTERNS[name])
    ).encode
    lines = SOURCES[0].splitlines(keepends=True)[:120]
    whole = encode("".join(lines)).tolist()
    broken = []
    for place, (line, following) in enumerate(itertools.pairwise(lines), 1):
        prompt = encode("".join(lines[:place])).tolist()
        if line.strip() and prompt != whole[: len(prompt)]:
            broken.append(following)
    assert broken and not "".join(broken).strip()


def test_by_hand_equals_the_library():
    tokenizer = tokenization.train_bpe(SOURCES, 600)
    ranks = tokenization.read_ranks(tokenizer)
    for word in ("lesson", "tokenization", "zzz", "𝛼"):
        by_hand = [
            ranks[part] for part in tokenization.join_pieces(word.encode(), ranks)
        ]
        assert by_hand == tokenizer(word)["input_ids"]


@given(st.text(alphabet="aé'st 1²_=\n\r\t\u3000", max_size=30))
def test_gpt2s_rule_cuts_as_it_was_published(text):
    published = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    assert regex.findall(PATTERNS["gpt2"], text) == regex.findall(published, text)


@settings(deadline=None)  # the first text waits for tiktoken's table
@given(st.text(alphabet="aé'sLl st 123²_=\n\r\t\u3000", max_size=30))
def test_nanochats_rule_is_gpt4s_with_two_digits(text):
    """But for white space at the very end, which today's tiktoken keeps in one."""
    os.environ["TIKTOKEN_CACHE_DIR"] = asset("tiktoken-vocabularies")
    published = tiktoken.get_encoding("cl100k_base")._pat_str
    two_digits = published.replace("{1,3}", "{1,2}")
    text += "z"
    assert regex.findall(PATTERNS["nanochat"], text) == regex.findall(
        two_digits, text
    )


def test_merges_compress_as_well_as_the_librarys():
    pattern = PATTERNS["gpt2"]
    ours = tokenization.train_bpe(SOURCES, 1024, pattern)
    theirs = tokenization.blank_tokenizer(pattern).train_new_from_iterator(
        SOURCES, 1024, show_progress=False
    )
    sizes = [sum(map(len, BulkEncoder(t)(SOURCES))) for t in (ours, theirs)]
    assert sizes[0] <= sizes[1] * 1.001
    shared = set(ours.get_vocab()) & set(theirs.get_vocab())
    assert len(shared) > 0.98 * 1024


def test_the_librarys_own_training_is_taken_too():
    trained = tokenization.blank_tokenizer(
        PATTERNS["gpt2"]
    ).train_new_from_iterator(SOURCES, 700, show_progress=False)
    assert [ids.tolist() for ids in BulkEncoder(trained)(SOURCES)] == trained(
        SOURCES
    )["input_ids"]


def test_order_and_type_with_many_threads():
    tokenizer = tokenization.train_bpe(SOURCES, 600)
    texts = [f"x{i} = {i}\n" * (1 + i % 7) for i in range(500)]
    arrays = BulkEncoder(tokenizer, threads=8)(texts)
    assert all(array.dtype == np.uint32 for array in arrays)
    assert [array.tolist() for array in arrays] == tokenizer(texts)["input_ids"]


def test_special_tokens_in_a_text_follow_the_tokenizers_own_setting():
    tokenizer = tokenization.train_bpe(SOURCES, 600)
    assert BulkEncoder(tokenizer).encode(END).tolist() == [tokenizer.eos_token_id]
    tokenizer.split_special_tokens = True
    ids = BulkEncoder(tokenizer).encode(f"a{END}")
    assert tokenizer.eos_token_id not in ids
    assert ids.tolist() == tokenizer(f"a{END}")["input_ids"]


def test_what_would_differ_is_refused():
    from tokenizers import AddedToken, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    def fresh():
        return tokenization.train_bpe(SOURCES, 600)

    lower, template, digits, greedy = fresh(), fresh(), fresh(), fresh()
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    template.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, template.eos_token_id)]
    )
    digits.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    greedy.add_tokens([AddedToken("<x>", lstrip=True)])
    for tokenizer in (lower, template, digits, greedy):
        with pytest.raises(
            CourseError, match="would not give this tokenizer's ids"
        ):
            BulkEncoder(tokenizer)


def test_a_tokenizer_that_cuts_in_no_way_is_refused():
    from tokenizers import pre_tokenizers

    tokenizer = tokenization.train_bpe(SOURCES, 600)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    assert tokenization.read_pattern(tokenizer) is None
    with pytest.raises(CourseError, match="does not cut text"):
        BulkEncoder(tokenizer)


def test_merges_that_do_not_follow_from_the_ids_are_refused():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(tokenization.byte_letters().values())
    words = {token: i for i, token in enumerate([*letters, "ab", "bc"])}
    engine = Tokenizer(models.BPE(vocab=words, merges=[("b", "c"), ("a", "b")]))
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    with pytest.raises(CourseError, match="do not follow from the order"):
        BulkEncoder(PreTrainedTokenizerFast(tokenizer_object=engine))


@pytest.mark.parametrize(
    "blanks", [("  ", "    ", "      "), ("      ", "    ", "  ")]
)
def test_added_tokens_of_which_one_begins_another_are_refused(blanks):
    tokenizer = tokenization.train_bpe(SOURCES, 600)
    tokenizer.add_tokens(list(blanks))
    with pytest.raises(CourseError, match="may claim the same characters"):
        BulkEncoder(tokenizer)


@pytest.mark.parametrize("normalized", [True, False])
def test_added_tokens_that_overlap_are_refused(normalized):
    from tokenizers import AddedToken

    tokenizer = tokenization.train_bpe(SOURCES, 600)
    tokenizer.add_tokens([AddedToken("a<|end", normalized=normalized)])
    with pytest.raises(CourseError, match="may claim the same characters"):
        BulkEncoder(tokenizer)


def test_added_tokens_that_stay_apart_are_taken():
    tokenizer = tokenization.train_bpe(SOURCES, 600)
    tokenizer.add_tokens(["<one>", "<two>"])
    text = "x<one><two> <one <two>"
    assert (
        BulkEncoder(tokenizer).encode(text).tolist() == tokenizer(text)["input_ids"]
    )


@pytest.mark.parametrize("rule", PATTERNS)
def test_a_rule_that_gives_up_on_blanks_is_named_and_the_others_go_on(rule):
    encode = BulkEncoder(tokenization.blank_tokenizer(PATTERNS[rule]))
    if rule in ("code", "lines"):
        assert len(encode.encode(" " * 2_000_000)) == 2_000_000
        return
    with pytest.raises(
        CourseError, match=rf"'{rule}' gave up .* 2,000,000(.|\n)*'code' or 'lines'"
    ):
        encode([" " * 2_000_000])


@pytest.mark.parametrize("size", [0, 2, 200, 257])
def test_a_vocabulary_without_room_for_the_bytes_is_named(size):
    with pytest.raises(CourseError, match="258 or more"):
        tokenization.train_bpe(SOURCES, size)


def test_a_vocabulary_of_nothing_but_bytes_is_one():
    tokenizer = tokenization.train_bpe(SOURCES, 258)
    assert (
        tokenizer.get_vocab()
        == tokenization.blank_tokenizer(PATTERNS["code"]).get_vocab()
    )


def test_a_callers_merges_are_its_own():
    table = {b"a": 0, b"b": 1, b"ab": 7}
    tokenization.recover_merges(table).clear()
    assert tokenization.recover_merges(table) == [(b"a", b"b")]


def test_a_lone_surrogate_is_an_error_and_not_a_silent_change():
    with pytest.raises(UnicodeEncodeError):
        BulkEncoder(tokenization.blank_tokenizer(PATTERNS["code"])).encode(
            "a\ud800b"
        )


def test_too_little_text_is_named():
    with pytest.raises(CourseError, match="only .* different joins"):
        tokenization.train_bpe(["ab"], 4096)


def test_a_table_with_an_orphan_is_named():
    with pytest.raises(CourseError, match="not the union"):
        tokenization.recover_merges({b"a": 0, b"b": 1, b"c": 2, b"abc": 3})


PUSH_AND_PULL = """
import sys
from transformers import AutoTokenizer
here = AutoTokenizer.from_pretrained(sys.argv[1])
here.push_to_hub("made-here", private=True)
back = AutoTokenizer.from_pretrained("reader/made-here")
text = "def f(x):\\n        return x<|endoftext|>"
assert back(text).input_ids == here(text).input_ids
assert back.backend_tokenizer.to_str() == here.backend_tokenizer.to_str()
assert (back.eos_token, back.pad_token) == (here.eos_token, here.pad_token)
"""


def run_against(
    hub: StandInHub, home: Path, code: str, *arguments: str, **more: str
):
    environment = {**os.environ, **hub.environment(str(home)), **more}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_to_a_hub_and_back(tmp_path):
    tokenizer = tokenization.train_bpe(SOURCES, 600)
    tokenizer.save_pretrained(tmp_path / "saved")
    with StandInHub() as hub:
        done = run_against(
            hub, tmp_path / "home", PUSH_AND_PULL, str(tmp_path / "saved")
        )
        assert done.returncode == 0, done.stderr
        files = hub.repos["reader/made-here"]
        assert {"tokenizer.json", "tokenizer_config.json"} <= set(files)
        assert (
            files["tokenizer.json"]
            == (tmp_path / "saved" / "tokenizer.json").read_bytes()
        )
        assert "POST /api/models/reader/made-here/commit/main" in hub.requests
        assert hub.private == {"reader/made-here"}


def test_the_stand_in_refuses_a_stranger_and_knows_what_it_lacks(tmp_path):
    code = "from huggingface_hub import create_repo; create_repo('mine')"
    pull = "from huggingface_hub import snapshot_download; snapshot_download('reader/none')"
    with StandInHub() as hub:
        assert (
            "401" in run_against(hub, tmp_path, code, HF_TOKEN="hf_" + TOKEN).stderr
        )
        assert hub.repos == {}
        run_against(hub, tmp_path, code)
        assert set(hub.repos) == {"reader/mine"}
        assert hub.private == set(), "nobody asked for a private one"
        assert "RepositoryNotFoundError" in run_against(hub, tmp_path, pull).stderr


def test_a_model_that_was_loaded_is_asked_for_once(tmp_path, monkeypatch):
    mine = tmp_path / "cache of the reader"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(mine))
    shape = GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    GPT2LMHeadModel(shape).save_pretrained(tmp_path / "files")
    load = partial(
        AutoModelForCausalLM.from_pretrained,
        "course/tiny",
        cache_dir=tmp_path / "cache",
    )
    with StandInHub() as hub:
        commit = hub.add("course/tiny", tmp_path / "files")
        assert sum(request["bytes sent"] for request in hub.ask(load)) > 0
        assert len(hub.ask(load)) == 1, "only what `main` means is asked"
        assert hub.ask(partial(load, revision=commit)) == []
    assert not mine.exists()


def test_the_hub_tells_what_was_asked_of_it_and_what_it_sent(tmp_path):
    files = {
        "config.json": b"{}",
        "model.safetensors": bytes(1000),
        "model.bin": b"1",
    }
    (tmp_path / "files").mkdir()
    for name, data in files.items():
        (tmp_path / "files" / name).write_bytes(data)
    home = tmp_path / "home"
    call = partial(
        snapshot_download, "course/tiny", cache_dir=home, ignore_patterns=["*.bin"]
    )
    before = constants.ENDPOINT, constants.HF_HUB_OFFLINE
    with StandInHub() as hub:
        commit = hub.add("course/tiny", tmp_path / "files")
        assert {file["path"]: file["size"] for file in hub.tree("course/tiny")} == {
            name: len(data) for name, data in files.items()
        }
        first = hub.ask(call)
        assert sum(request["bytes sent"] for request in first) == 1002
        assert all("model.bin" not in request["address"] for request in first)
        again = hub.ask(call)
        assert [request["method"] for request in again] == ["GET"]
        assert hub.ask(call, offline=True) == []
        with pytest.raises(RepositoryNotFoundError):
            hub.ask(partial(snapshot_download, "course/none", cache_dir=home))
        assert before == (constants.ENDPOINT, constants.HF_HUB_OFFLINE)
    link = home / "models--course--tiny/snapshots" / commit
    assert (link / "model.safetensors").read_bytes() == bytes(1000)


@pytest.mark.parametrize(
    ("end", "least", "most"),
    [(r"\p{L}(?=\P{L})", 0, 0), (r"\((?=\S)", 0.5, 1), (r"\.(?=\S)", 0.5, 1)],
    ids=["word", "bracket", "dot"],
)
def test_the_code_pattern_cuts_behind_words_and_not_behind_punctuation(
    end, least, most
):
    kept = []
    for text in SOURCES:
        cuts = {found.end() for found in regex.finditer(PATTERNS["code"], text)}
        kept += [place.end() in cuts for place in regex.finditer(end, text)]
    broken = 1 - sum(kept) / len(kept)
    assert least <= broken <= most
