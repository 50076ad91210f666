"""The command line: `python -m course fetch | run | check | report | sync | keep`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

from course.notebooks import edited, prose_problems, select
from utils.errors import ROOT, CourseError, short_path
from utils.profiles import Profile, choose_profile

HELP = """what to do:
  fetch    fetch the weights and data that lessons take; `fetch --help` says more
  run      execute the lessons, hold their figures to expected/, write the report as they finish
  check    hold the last run to expected/, generated cells to their sources, links to their lessons
  report   write build/report/index.html of the last run again
  sync     write headers, set-up cells, footers and the README's table
  keep     make the last run the record: results/, and at laptop the committed outputs"""
Problems = list[tuple[Path, str]]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The arguments, or a message and exit status 2."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m course", epilog=HELP, formatter_class=form
    )
    parser.add_argument("action", choices=list(ACTIONS))
    parser.add_argument(
        "--profile", default="auto", help="smoke, laptop, gpu, cluster or auto"
    )
    parser.add_argument("--only", help="05, 04-07 or 00,02")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument(
        "--fresh", action="store_true", help="run again even what is done"
    )
    parser.add_argument(
        "--strict", action="store_true", help="check what is committed, too"
    )
    parser.add_argument(
        "-p", dest="parameters", action="append", default=[], metavar="NAME=VALUE"
    )
    return parser.parse_args(arguments)


def read_parameter(pair: str) -> tuple[str, Any]:
    """`STEPS=20` as a name and a value; what is not JSON is a string."""
    name, equals, text = pair.partition("=")
    if not equals:
        raise CourseError(
            f"-p {pair} is not understood", fix="write it as -p NAME=VALUE"
        )
    try:
        return name, json.loads(text)
    except json.JSONDecodeError:
        return name, text


def run(options: argparse.Namespace, profile: Profile) -> Problems:
    """Run, then say what is wrong with what ran."""
    if importlib.util.find_spec("ipykernel") is None:
        raise CourseError(
            "no kernel is installed: ipykernel is missing",
            sys.prefix,
            "run `make setup`",
        )
    from course import runner
    from utils.errors import build_folder

    start = time.perf_counter()
    extra = dict(read_parameter(pair) for pair in options.parameters)
    results = runner.run_course(
        select(options.only), profile, options.seed, extra, options.fresh
    )
    problems = [
        (ROOT / result.name, result.status)
        for result in results
        if result.status != "passed"
    ]
    if extra or options.seed != 42:
        print("figures are not compared: these are not the parameters of expected/")
    else:
        for result in results:
            if result.status == "passed":
                problems += run_problems(
                    ROOT / "notebooks" / f"{result.name}.ipynb", profile
                )
    reused = sum(result.reused for result in results)
    note = f", {reused} done before (--fresh runs them again)" if reused else ""
    seconds = time.perf_counter() - start
    print(
        f"{len(results)} notebooks, {seconds:.0f} s, profile {profile.name}{note}"
    )
    print(f"report: {short_path(build_folder() / 'report' / 'index.html')}")
    return problems


def run_problems(path: Path, profile: Profile, strict: bool = False) -> Problems:
    """What is wrong with the last run of a lesson."""
    from course import results, verdicts

    executed = results.run_folder(profile) / path.name
    return [
        (path, text)
        for text in verdicts.problems_of(executed, profile.name, path, strict)
    ]


def check(options: argparse.Namespace, profile: Profile) -> Problems:
    """Everything that can be known without executing anything.

    What a reader has changed in a lesson of her own is told and is no problem, unless `--strict`
    asks for what is published.
    """
    from course import generate

    problems = [
        (path, "something generated is stale, run sync")
        for path in generate.sync(write_it=False)
    ]
    problems += prose_problems()
    for path in select(options.only):
        try:
            problems += check_run(path, options, profile)
        except CourseError as error:
            problems.append((path, str(error)))
    if options.strict:
        return problems
    changed = {
        path for path, _ in problems if path.suffix == ".ipynb" and edited(path)
    }
    for path in sorted(changed):
        texts = [text for place, text in problems if place == path]
        print(f"· {path.stem}, which you have changed: {'; '.join(texts)}")
    return [(path, text) for path, text in problems if path not in changed]


def check_run(
    path: Path, options: argparse.Namespace, profile: Profile
) -> Problems:
    """What is wrong with the last run of one lesson; strictly, also with what is committed."""
    from course import notebooks, results, verdicts

    mark = results.fingerprint(
        path, {"PROFILE": profile.name, "SEED": options.seed}
    )
    result = results.read_result(path.stem, profile)
    if result is None or result.status != "passed" or result.fingerprint != mark:
        return [
            (path, f"no finished run of this notebook at profile {profile.name}")
        ]
    problems = run_problems(path, profile, options.strict)
    if options.strict:
        problems += [
            (path, text)
            for text in verdicts.problems_of(path, "laptop", strict=True)
        ]
        counts = [
            cell["execution_count"]
            for cell in notebooks.cells(notebooks.read(path), "code")
        ]
        if counts != list(range(1, len(counts) + 1)):
            problems.append((path, "its cells were not executed 1..n"))
    return problems


def report(options: argparse.Namespace, profile: Profile) -> Problems:
    """Write the report and say where it is."""
    from course.report import write_report

    print(f"report: {short_path(write_report(profile))}")
    return []


def sync(options: argparse.Namespace, profile: Profile) -> Problems:
    """Write everything generated."""
    from course import generate

    print(
        "written:",
        ", ".join(map(short_path, generate.sync())) or "nothing, all is up to date",
    )
    return []


def keep(options: argparse.Namespace, profile: Profile) -> Problems:
    """Make the last run the record."""
    from course.report import commit, keep

    names = keep(profile, select(options.only))
    print(f"kept at commit {commit()}:", ", ".join(names))
    return sync(options, profile)


ACTIONS = {"run": run, "check": check, "report": report, "sync": sync, "keep": keep}


def main(arguments: list[str] | None = None) -> int:
    """Do one thing; 0: all is well, 1: something is off, 2: not done at all, 130: interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments[:1] == ["fetch"]:
            from course import fetch

            return fetch.main(arguments[1:])
        options = parse(arguments)
        profile, reason = choose_profile(options.profile)
        if options.action == "run":
            print(f"profile {profile.name} ({reason})", flush=True)
        problems = ACTIONS[options.action](options, profile)
    except CourseError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "\ninterrupted: the same command goes on with what is not yet done",
            file=sys.stderr,
        )
        return 130
    for path, problem in problems:
        print(f"✘ {path.stem}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
