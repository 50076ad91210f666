"""The command line: `python -m course run | check | report | sync | keep`."""
from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from typing import Any

from utils.errors import CourseError, ROOT, short_path
from course.notebooks import select
from utils.profiles import choose_profile, Profile

ACTIONS = """what to do:
  run      execute the notebooks and hold their figures to expected/
  check    hold the last run, the committed outputs and all that is generated to the rules
  report   write build/report/index.html of the last run
  sync     write headers, bootstrap cells, footers and the README's table
  keep     make the last run the record: results/, and at laptop the committed outputs"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The arguments, or a message and exit status 2."""
    parser = argparse.ArgumentParser(prog="python -m course", epilog=ACTIONS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "check", "report", "sync", "keep"])
    parser.add_argument("--profile", default="auto", help="smoke, laptop, gpu, cluster or auto")
    parser.add_argument("--only", help="05, 04-07 or 00,02")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fresh", action="store_true", help="run again even what is done")
    parser.add_argument("-p", dest="parameters", action="append", default=[], metavar="NAME=VALUE")
    return parser.parse_args(arguments)


def read_parameter(pair: str) -> tuple[str, Any]:
    """`STEPS=20` as a name and a value; what is not JSON is a string."""
    name, equals, text = pair.partition("=")
    if not equals:
        raise CourseError(f"-p {pair} is not understood", fix="write it as -p NAME=VALUE")
    try:
        return name, json.loads(text)
    except json.JSONDecodeError:
        return name, text


def run(given: argparse.Namespace, profile: Profile) -> list[str]:
    """Run, then say what is wrong with what ran."""
    if importlib.util.find_spec("ipykernel") is None:
        raise CourseError("no kernel is installed: ipykernel is missing", sys.prefix, "run `make setup`")
    from course import runner, verdicts

    extra, start = dict(map(read_parameter, given.parameters)), time.perf_counter()
    results = runner.run_course(select(given.only), profile, given.seed, extra, given.fresh)
    problems = [f"{r.name}: {r.status}" for r in results if r.status != "passed"]
    passed = [runner.run_folder(profile) / f"{r.name}.ipynb" for r in results if r.status == "passed"]
    if extra or given.seed != 42:
        print("figures are not compared: these are not the parameters of expected/")
    else:
        problems += [f"{p.stem}: {text}" for p in passed for text in verdicts.problems_of(p, profile.name)]
    again = f", {sum(r.reused for r in results)} done before (--fresh runs them again)"
    print(f"{len(results)} notebooks, {time.perf_counter() - start:.0f} s, profile {profile.name}"
          + again * any(r.reused for r in results))
    return problems


def check(given: argparse.Namespace, profile: Profile) -> list[str]:
    """Everything that can be known without executing anything."""
    from course import generate, runner, verdicts

    problems = [f"{short_path(path)}: something generated is stale, run sync" for path in generate.stale()]
    parameters = {"PROFILE": profile.name, "SEED": given.seed}
    ran = {name: r["status"] for name, r in runner.results_of(profile).items()
           if r["fingerprint"] == runner.fingerprint(ROOT / "notebooks" / f"{name}.ipynb", parameters)}
    for path in select(given.only):
        if ran.get(path.stem) != "passed":
            problems.append(f"{path.stem}: no finished run of this notebook at profile {profile.name}")
            continue
        for place, at in ((runner.run_folder(profile) / path.name, profile.name), (path, "laptop")):
            problems += [f"{short_path(place)}: {text}" for text in verdicts.problems_of(place, at, True)]
    return problems


def report(given: argparse.Namespace, profile: Profile) -> list[str]:
    """Write the report and say where it is."""
    from course import report as record

    print(f"report: {record.report(profile)}")
    return []


def sync(given: argparse.Namespace, profile: Profile) -> list[str]:
    """Write everything generated."""
    from course import generate

    print("written:", ", ".join(map(short_path, generate.sync())) or "nothing, all is up to date")
    return []


def keep(given: argparse.Namespace, profile: Profile) -> list[str]:
    """Make the last run the record."""
    from course import report as record

    print("kept:", ", ".join(record.keep(profile, select(given.only))))
    return sync(given, profile)


def main(arguments: list[str] | None = None) -> int:
    """Do one thing; 0: all is well, 1: something is off, 2: not done at all, 130: interrupted."""
    given = parse(arguments)
    try:
        profile, why = choose_profile(given.profile)
        if given.action == "run":
            print(f"profile {profile.name} ({why})", flush=True)
        problems = globals()[given.action](given, profile)
    except CourseError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted: the same command goes on with what is not yet done", file=sys.stderr)
        return 130
    for problem in problems:
        print(f"✘ {problem}", file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
