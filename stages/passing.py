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
# To start a worker costs about as much as to judge so many small programs.
WORTH_A_WORKER = 8


def judge_all(
    problems: Sequence[Problem],
    completions: Texts,
    workers: int = 2,
) -> list[list[Verdict]]:
    """The verdict on each completion of each problem; equal programs are run once."""
    jobs = []
    for one, texts in zip(problems, completions):
        programs = map(one.program, texts)
        jobs.append([(program, one.tests) for program in programs])
    distinct = list(dict.fromkeys(chain(*jobs)))
    with Sandbox(workers_for(len(distinct), workers)) as sandbox:
        judged = sandbox.judge(distinct)
    verdicts = dict(zip(distinct, judged))
    rows = []
    for row in jobs:
        rows.append([verdicts[job] for job in row])
    return rows


def workers_for(programs: int, most: int) -> int:
    """How many workers a number of programs is worth, at least one.

    >>> workers_for(5, most=2), workers_for(500, most=2)
    (1, 2)
    """
    return max(1, min(most, programs // WORTH_A_WORKER))


def results_of(
    problems: Sequence[Problem],
    completions: Texts,
    workers: int = 2,
) -> list[list[tuple[str, ...]]]:
    """What each completion returns for the calls of its problem's tests, as text."""
    jobs = []
    for one, texts in zip(problems, completions):
        calls = tuple(one.calls)
        programs = map(one.program, texts)
        jobs.append([(program, calls) for program in programs])
    distinct = list(dict.fromkeys(chain(*jobs)))
    with Sandbox(workers_for(len(distinct), workers)) as sandbox:
        ran = sandbox.run(distinct)
    results = {}
    for job, verdict in zip(distinct, ran):
        results[job] = tuple(verdict.results)
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
    misses = 1 - k / ranks
    return float(1 - np.prod(misses))


def points_at_k(verdicts: Sequence[Sequence[bool]], k: int) -> np.ndarray:
    """The pass@k of each problem, from the verdicts of its samples.

    >>> points_at_k([[True, False], [False, False]], 1)
    array([0.5, 0. ])
    """
    points = []
    for row in verdicts:
        samples = len(row)
        passed = sum(map(bool, row))
        point = pass_at_k(samples, passed, k)
        points.append(point)
    return np.array(points)


def majority(results: Sequence[Sequence[str]]) -> int:
    """The place of the first program that returns what most programs return.

    A program has no vote if it returned nothing, or raised at every call. Where none has a vote,
    it is the first.

    >>> majority([("4",), ("raised TypeError",), ("5",), ("5",)])
    2
    """
    answers = [tuple(one) for one in results]
    votes = Counter(filter(may_vote, answers))
    if not votes:
        return 0
    # Of two that are equally frequent, Counter names the one that it met first.
    winner, _ = votes.most_common(1)[0]
    return answers.index(winner)


def may_vote(results: Sequence[str]) -> bool:
    """Whether a program has returned anything.

    >>> may_vote(("raised TypeError", "3")), may_vote(("raised TypeError",)), may_vote(())
    (True, False, False)
    """
    raised = [text.startswith("raised ") for text in results]
    return not all(raised)
