"""What the lesson on translation reads, trains and asks with: pairs, systems and their scores."""

from __future__ import annotations

import random
from collections import Counter
from datetime import date
from pathlib import Path

import numpy as np
import polib
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import T5Config, T5ForConditionalGeneration

from stages import translators
from stages.dates import LETTERS, START, all_days, date_batch, in_words
from stages.evaluation import gain_of_sums
from stages.title_model import SHAPE, Spelling, keep_tokens, unknown_letters
from stages.translation import (
    Memory,
    Pair,
    clean,
    entries,
    mark,
    originals,
    pairs_of,
    placeholders_kept,
    problem_of,
    recall,
    restore,
    split,
    state_of,
    tidy,
)
from stages.translators import in_batches, parse_line, t5_for, t5_system
from utils.errors import CourseError

pieces = st.sampled_from(
    ["Page ", "%(n)s", "%s", "<b>", "</b>", "{user}", "&amp;", "ș "]
)


@given(st.lists(pieces, max_size=12))
def test_marked_text_is_restored_to_the_letter(parts):
    text, numbers = "".join(parts), {}
    marked = mark(text, numbers)
    assert restore(marked, numbers) == text
    assert not any(placeholder in marked for placeholder in numbers)


def test_a_marker_that_the_source_has_not_becomes_nothing():
    assert restore("<x1> și <x7>", {"%s": 1}) == "%s și "


@pytest.mark.parametrize(
    ("source", "target", "problem"),
    [
        ("Save", "", "a plural form is empty"),
        ("Save <x1>", "Salvează", "placeholders differ"),
        ("Save <x1>", "Salvează <x1> <x2>", "placeholders differ"),
        ("E-mail", "e-mail!", "same in both languages"),
        ("a b " * 11, "unu doi", "over 20 words"),
        ("Save <x1>", "Salvează <x1>", ""),
    ],
)
def test_every_problem_of_a_pair_has_its_name(source, target, problem):
    assert problem_of(source, target) == problem


def test_cedillas_become_commas():
    assert tidy("Şi  ţara") == "Și țara"


@pytest.fixture
def catalogue(tmp_path):
    """A project of four messages: plural, fuzzy, untranslated and said twice."""
    file = polib.POFile()
    plural = {0: "O pagină", 1: "Două pagini", 2: "Douăzeci de pagini"}
    file.append(
        polib.POEntry(
            msgid="One page", msgid_plural="%s pages", msgstr_plural=plural
        )
    )
    file.append(polib.POEntry(msgid="Leave", msgstr="Ieși", flags=["fuzzy"]))
    file.append(polib.POEntry(msgid="Empty", msgstr=""))
    file.append(polib.POEntry(msgid="Log out", msgstr="Deconectare"))
    file.append(polib.POEntry(msgid="Log out!", msgstr="Deconectează-te"))
    folder = tmp_path / "django" / "locale" / "ro"
    folder.mkdir(parents=True)
    file.save(str(folder / "django.po"))
    return tmp_path


def test_a_catalogue_is_cleaned_and_every_loss_is_counted(catalogue):
    pairs, lost = clean(catalogue, "ro")
    assert [(pair.source, pair.target) for pair in pairs] == [
        ("One page", "O pagină"),
        ("Log out", "Deconectare"),
    ]
    again = "said before in its project"
    assert lost == {
        "fuzzy": 1,
        "untranslated": 1,
        "placeholders differ": 1,
        again: 1,
    }


def test_of_a_plural_the_first_form_and_the_last_are_taken(catalogue):
    entry = next(
        entry for _, entry in entries(catalogue, "ro") if entry.msgid_plural
    )
    assert state_of(entry) == "live"
    assert pairs_of(entry)[1] == ("%s pages", "Douăzeci de pagini")


def test_a_language_without_catalogues_is_a_plain_error(catalogue):
    with pytest.raises(CourseError, match="no catalogue of the language 'xx'"):
        list(entries(catalogue, "xx"))


def pair(project, source, target="țintă"):
    return Pair(project, source, target, {})


def test_no_message_of_the_test_is_known_or_nearly_known_from_training():
    known = [
        pair("django", "Delete the selected pages"),
        pair("wagtail", "Log out"),
    ]
    new = [
        pair("sphinx", "Delete the selected page"),
        pair("sphinx", "LOG OUT!"),
        pair("sphinx", "Build the index"),
        pair("cms", "Publish a plugin"),
    ]
    train, validation, test = split(known + new)
    assert train == known
    assert [one.source for one in validation] == ["Publish a plugin"]
    assert [one.source for one in test] == ["Build the index"]


def test_the_memory_finds_the_nearest_and_says_how_near():
    memory = Memory(["Save the page", "Log out", "Log in"])
    assert memory.nearest("log OUT")[:2] == (1.0, 1)
    assert memory.nearest("zzz") == (0.0, 0)


def test_a_recalled_translation_gets_the_placeholders_of_its_own_source():
    known = [Pair("django", "Hello <x1>", "Salut <x1>", {"%(name)s": 1})]
    asked = [Pair("cms", "Hello <x1>!", "-", {"{user}": 1})]
    assert recall(known, asked) == ["Salut {user}"]
    assert originals(asked)[0] == ["Hello {user}!"]


def test_placeholders_are_kept_only_if_all_are_there_and_no_other():
    pairs = [
        Pair("a", "<x1> of <x2>", "-", {"%s": 1, "%d": 2}),
        pair("a", "none"),
    ]
    assert placeholders_kept(["%d din %s", "nimic"], pairs) == 1
    assert placeholders_kept(["%d din %d", "nimic"], pairs) == 0


def test_batches_hold_every_example_once_a_pass_and_similar_lengths_together():
    noise = random.Random(0)
    examples = [{"labels": [0] * noise.randint(1, 40), "n": n} for n in range(256)]
    rows = in_batches(examples, steps=32, batch=8, seed=1)
    assert sorted(row["n"] for row in rows) == list(range(256))
    spans = []
    for start in range(0, 256, 8):
        lengths = [len(row["labels"]) for row in rows[start : start + 8]]
        spans.append(max(lengths) - min(lengths))
    assert np.mean(spans) < 10


class Letters:
    """A vocabulary of single letters: `a` to `z`, 0 padding, 1 end, 2 unknown."""

    pad_token_id, eos_token_id, unk_token_id = 0, 1, 2
    letters = "abcdefghijklmnopqrstuvwxyzX1 "

    def __call__(self, text):
        ids = [
            3 + self.letters.find(one) if one in self.letters else 2 for one in text
        ]
        return {"input_ids": [*ids, 1]}

    def decode(self, tokens, skip_special_tokens):
        return "".join(self.letters[token - 3] for token in tokens if token > 2)


def test_a_text_survives_the_spelling_for_t5():
    words = Letters()
    unknown = unknown_letters("Șa S b", words)
    assert unknown == ["S", "Ș"]
    spelling = Spelling(words, unknown)
    message = Pair("cms", "Save <x1>", "Salvea <x1>", {"%s": 1})
    tokens = spelling.ids(message.target)
    assert spelling.read(tokens, message) == "Salvea %s"


def test_labels_and_answers_of_a_t5_speak_of_the_kept_tokens():
    words = Letters()
    kept = [0, 1, 2, *range(3, 10)]  # a to g
    system = t5_system(None, Spelling(words, []), kept, "ask: ")
    labels = system.encode(pair("cms", "x", "bad zz"))["labels"]
    assert labels == [4, 3, 6, 2, 2, 2, 1]  # what was not kept is unknown
    assert system.tell(torch.tensor(labels), pair("cms", "x")) == "bad"
    assert system.ask(pair("cms", "x")) == "ask: x"


def test_a_t5_for_a_language_keeps_the_tokens_of_its_translations(monkeypatch):
    cut = []
    monkeypatch.setattr(translators, "load_t5_words", lambda folder: Letters())
    monkeypatch.setattr(translators, "load_title_model", lambda folder: None)
    monkeypatch.setattr(
        translators, "keep_tokens", lambda model, kept: cut.extend(kept.tolist())
    )
    system = t5_for([pair("cms", "x", "<x1> bad")], Path("folder"), "ask: ")
    wanted = Letters()("bad X1")["input_ids"]
    assert cut == sorted({0, 2, *wanted})
    message = pair("cms", "x", "bad")
    labels = system.encode(message)["labels"]
    assert system.tell(torch.tensor(labels), message) == "bad"


def test_a_decoder_with_fewer_tokens_gives_the_same_scores_for_them():
    torch.manual_seed(0)
    shape = T5Config(
        vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    model = T5ForConditionalGeneration(shape).eval()
    source, target = torch.tensor([[5, 9, 1]]), torch.tensor([[0, 7, 3]])
    with torch.no_grad():
        before = model(input_ids=source, decoder_input_ids=target).logits
    kept = torch.tensor([0, 1, 2, 3, 7, 20])
    keep_tokens(model, kept)
    with torch.no_grad():
        after = model(
            input_ids=source, decoder_input_ids=torch.tensor([[0, 4, 3]])
        ).logits
    torch.testing.assert_close(after, before[..., kept])
    assert not model.shared.weight.requires_grad
    assert model.lm_head.weight.requires_grad


def test_a_line_of_options_is_parsed_and_a_lacking_one_is_seen(tmp_path):
    line = {"--model_name_or_path": "t5", "--output_dir": str(tmp_path)}
    line |= {
        "--dataset_name": "wmt16",
        "--source_lang": "en",
        "--target_lang": "ro",
    }
    script, arguments = parse_line({**line, "--do_eval": "True"})
    assert script.model_name_or_path == "t5" and arguments.do_eval
    assert not parse_line(line)[1].do_eval
    nameless = {name: value for name, value in line.items() if "model" not in name}
    assert parse_line(nameless) is None
    for option in ("--dataset_name", "--source_lang", "--target_lang"):
        shorter = {name: value for name, value in line.items() if name != option}
        with pytest.raises(ValueError):
            parse_line(shorter)


def test_dates_are_read_back_from_their_letters():
    days = [date(1987, 3, 5), date(2013, 12, 24)]
    source, target = date_batch(days, random.Random(3))
    texts = ["".join(LETTERS[one] for one in row) for row in target]
    assert texts == ["1987-03-05", "2013-12-24"]
    assert START not in source and START not in target


def test_the_days_are_two_hundred_years_each_once():
    days = all_days(0)
    assert len(days) == len(set(days)) == 73_049
    forms = {in_words(days[0], random.Random(seed)) for seed in range(60)}
    assert len(forms) >= 4


def share(sums):
    """A score that is not a mean: the share of hits in all that was counted."""
    return sums[..., 0] / np.maximum(sums[..., 1], 1)


def test_a_gain_of_sums_weighs_long_messages_and_knows_a_clear_case():
    long, short = [9, 10], [0, 1]
    ours = np.array([long, short] * 40, float)
    theirs = np.array([[5, 10], short] * 40, float)
    found = gain_of_sums(share, [ours], [theirs])
    assert found.value == pytest.approx(9 / 11 - 5 / 11)
    assert found.low > 0.2 and found.p < 0.001
    assert found.drawn == "80 messages, 1 seed against 1"


def test_a_gain_of_sums_that_one_seed_made_is_not_shown():
    rng = np.random.default_rng(0)

    def run(right):
        hits = rng.random(200) < right
        return np.stack([hits, np.ones(200)], -1).astype(float)

    ours = [run(0.5), run(0.5), run(0.95)]
    theirs = [run(0.5), run(0.5), run(0.5)]
    assert gain_of_sums(share, ours[2:], theirs[:1]).low > 0
    assert gain_of_sums(share, ours, theirs).low < 0.02


def test_a_gain_of_sums_wants_the_same_messages():
    with pytest.raises(ValueError, match="same messages"):
        gain_of_sums(share, [np.ones((3, 2))], [np.ones((4, 2))])


def test_losses_add_up(catalogue):
    pairs, lost = clean(catalogue, "ro")
    forms = Counter()
    for _, entry in entries(catalogue, "ro"):
        forms["pairs"] += len(pairs_of(entry))
    assert forms["pairs"] == len(pairs) + sum(lost.values())


def test_the_nearest_of_equals_is_the_first():
    memory = Memory(["Log out", "log out!"])
    assert memory.nearest("log out") == (1.0, 0)


def test_the_packaged_t5_does_not_scale_its_outputs_down():
    assert T5Config(**SHAPE).scale_decoder_outputs is False
    tied = {**SHAPE, "tie_word_embeddings": True}
    assert T5Config(**tied).scale_decoder_outputs is True
