"""How often the programs of a model pass, and which of several to take when nobody can test them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np

from stages.problems import Problem
from stages.sandbox import Sandbox, Verdict
from utils.errors import CourseError

Texts = Sequence[Sequence[str]]


def judge_all(
    problems: Sequence[Problem], completions: Texts, workers: int = 2
) -> list[list[Verdict]]:
    """The verdict on each completion of each problem; equal programs are run once."""
    jobs = [
        [(one.program(text), one.tests) for text in texts]
        for one, texts in zip(problems, completions)
    ]
    distinct = list(dict.fromkeys(chain(*jobs)))
    with Sandbox(workers) as sandbox:
        verdicts = dict(zip(distinct, sandbox.judge(distinct)))
    return [[verdicts[job] for job in row] for row in jobs]


def results_of(
    problems: Sequence[Problem], completions: Texts, workers: int = 2
) -> list[list[tuple[str, ...]]]:
    """What each completion returns for the calls of its problem's tests, as text."""
    jobs = [
        [(one.program(text), tuple(one.calls)) for text in texts]
        for one, texts in zip(problems, completions)
    ]
    distinct = list(dict.fromkeys(chain(*jobs)))
    with Sandbox(workers) as sandbox:
        ran = sandbox.run(distinct)
    results = {job: tuple(verdict.results) for job, verdict in zip(distinct, ran)}
    return [[results[job] for job in row] for row in jobs]


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The probability that one of k samples passes at least, without bias, from n samples of which c passed.

    It is 1 - C(n - c, k) / C(n, k), as a product, because the binomials of many samples are no floats.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2)
    (0.25, 0.5)
    """
    if not (0 <= passed <= samples and 1 <= k <= samples):
        what = f"{passed} of {samples} samples passed, and k is {k}"
        fix = "k and the samples that passed are at most the samples"
        raise CourseError(f"there is no pass@k: {what}", fix=fix)
    failed = samples - passed
    if failed < k:
        return 1.0
    ranks = np.arange(failed + 1, samples + 1)
    return float(1 - np.prod(1 - k / ranks))


def points_at_k(verdicts: Sequence[Sequence[bool]], k: int) -> np.ndarray:
    """The pass@k of each problem, from the verdicts of its samples.

    >>> points_at_k([[True, False], [False, False]], 1)
    array([0.5, 0. ])
    """
    points = [pass_at_k(len(row), sum(map(bool, row)), k) for row in verdicts]
    return np.array(points)


def majority(results: Sequence[Sequence[str]]) -> int:
    """The place of the first program that returns what most programs return.

    A program has no vote if it returned nothing, or raised at every call. Where none has a vote,
    it is the first.

    >>> majority([("4",), ("raised TypeError",), ("5",), ("5",)])
    2
    """
    votes = Counter(tuple(one) for one in results if may_vote(one))
    if not votes:
        return 0
    # Of two that are equally frequent, Counter names the one that it met first.
    winner = votes.most_common(1)[0][0]
    return [tuple(one) for one in results].index(winner)


def may_vote(results: Sequence[str]) -> bool:
    """Whether a program has returned anything.

    >>> may_vote(("raised TypeError", "3")), may_vote(("raised TypeError",)), may_vote(())
    (True, False, False)
    """
    return any(not text.startswith("raised ") for text in results)
