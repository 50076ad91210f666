"""The command line: `python -m course setup | doctor | lab | run | …`, and the program `course`.

Packages are imported where they are used, because `setup` and `doctor` run before there are any.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

from course import setup
from course.notebooks import edited, parameters, select
from utils.errors import ROOT, CourseError, build_folder, short_path
from utils.profiles import Profile, choose_profile
from utils.show import tolerate_narrow_consoles

HELP = """what to do:
  setup    make .venv and install what a run needs
  doctor   say what this machine has and what it lacks
  lab      open a lesson in JupyterLab, lesson 00 unless --only names another
  work     copy the lessons into work/ for yourself, or bring those copies up to date
  fetch    fetch the weights and data that lessons take: those named, or all
  run      execute the lessons, hold their figures to expected/, write the report as they finish
  check    hold the last run to expected/, and generated cells to their sources
  report   write build/report/index.html of the last run again
  sync     write headers, set-up cells, footers and the README's table
  keep     make the last run the record: results/, and at laptop the committed outputs
  elsewhere  run tests and lessons in other environments: oldest, locked, newest, colab
  student  write lessons without their solutions into a folder: course student FOLDER
  grade    judge the notebooks handed in below a folder, in a cage: course grade FOLDER
  translations  say what of the pages in other languages is missing or older than the English,
           with --strict as an error; with --renew bring their catalogues up to date
  site     build the pages: build/site, from the committed lessons, nothing executed
  publish  write the copies of the lessons that Colab and Kaggle open into build/publish
  test, slow-tests, style, bench, faults, release-check, clean: what `make` says of them"""
Problems = list[tuple[Path, str]]


def parse(arguments: list[str] | None) -> Namespace:
    """The arguments, or a message and exit status 2."""
    form = RawDescriptionHelpFormatter
    parser = ArgumentParser("python -m course", epilog=HELP, formatter_class=form)
    add = parser.add_argument
    add("action", choices=[*EARLY, *ACTIONS, *CHORES])
    add("names", nargs="*", metavar="NAME", help="what to fetch, or where to run")
    add("--profile", default="auto", help="smoke, laptop, gpu, cluster or auto")
    add("--only", "--for", help="lessons: 05, 04-07 or 00,02")
    add("--seed", type=int, default=42)
    add("--fresh", "--again", action="store_true", help="do even what is done")
    add("--strict", action="store_true", help="check what is committed, too")
    add("--list", action="store_true", help="fetch nothing, say what there is")
    add("--renew", action="store_true", help="write the list of a place anew")
    add("--torch", help="set-up: the build of PyTorch, cpu, cuda or auto")
    add("--tests", action="store_true", help="set-up: the test tools, too")
    add("--site", action="store_true", help="set-up: what builds the pages, too")
    add("--serve", action="store_true", help="site: show it, too, on this machine")
    add("-p", dest="dials", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_intermixed_args(arguments)
    for_a_class = options.action in ("student", "grade")
    if for_a_class and len(options.names) != 1:
        parser.error(f"name one folder: course {options.action} FOLDER")
    named = for_a_class or options.action in ("fetch", "elsewhere")
    if options.names and not named:
        parser.error("choose lessons with --only")
    if options.action == "sync" and options.only:
        parser.error("sync writes all that is generated: leave --only out")
    return options


def read_dials(pairs: list[str], paths: list[Path]) -> dict[str, Any]:
    """`STEPS=20` as a name and a value; what is not JSON is text, what no lesson knows an error."""
    known = set()
    for path in paths:
        known |= set(parameters(path))
    dials = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or name not in known:
            what = f"-p {pair}: no chosen lesson has that parameter"
            names = ", ".join(sorted(known))
            raise CourseError(what, fix=f"write -p NAME=VALUE; they have {names}")
        try:
            dials[name] = json.loads(text)
        except ValueError:
            dials[name] = text
    return dials


def run(options: Namespace, profile: Profile) -> Problems:
    """Run, then say what is wrong with what ran."""
    from course import runner

    if importlib.util.find_spec("ipykernel") is None:
        what = "no kernel is installed: ipykernel is missing"
        raise CourseError(what, sys.prefix, "python3 -m course setup")
    start = time.perf_counter()
    paths = select(options.only)
    dials = read_dials(options.dials, paths)
    usual = not dials and options.seed == 42
    dials["SEED"] = options.seed
    results = runner.run_course(paths, profile, dials, options.fresh)
    problems = []
    for result in results:
        path = ROOT / "notebooks" / f"{result.name}.ipynb"
        if result.status != "passed":
            problems.append((path, result.status))
        elif usual:
            problems += run_problems(path, profile)
    if not usual:
        print("figures are not compared: these are not the dials of expected/")
    reused = sum(result.reused for result in results)
    note = f", {reused} done before (--fresh runs them again)" if reused else ""
    seconds = time.perf_counter() - start
    count = f"{len(results)} notebooks, {seconds:.0f} s"
    print(f"{count}, profile {profile.name}{note}")
    index = build_folder() / "report" / "index.html"
    print(f"report: {short_path(index)}")
    return problems


def run_problems(path: Path, profile: Profile, strict: bool = False) -> Problems:
    """What is wrong with the last run of a lesson."""
    from course import results, verdicts

    executed = results.run_folder(profile) / path.name
    texts = verdicts.problems_of(executed, profile.name, path, strict)
    return [(path, text) for text in texts]


def check(options: Namespace, profile: Profile) -> Problems:
    """Everything that can be known without executing anything.

    What a reader has changed in a lesson of her own is told and is no problem, unless `--strict`
    asks for what is published.
    """
    from course import generate

    stale = "something generated is stale, run sync"
    problems = [(path, stale) for path in generate.sync(write_it=False)]
    for path in select(options.only):
        try:
            problems += check_run(path, options, profile)
        except CourseError as error:
            problems.append((path, str(error)))
    counted = []
    for path, text in problems:
        if path.suffix == ".ipynb" and not options.strict and edited(path):
            print(f"· {path.stem}, which you have changed: {text}")
        else:
            counted.append((path, text))
    return counted


def check_run(path: Path, options: Namespace, profile: Profile) -> Problems:
    """What is wrong with the last run of one lesson; strictly, also with what is committed."""
    from course import results, verdicts

    parameters = {"PROFILE": profile.name, "SEED": options.seed}
    mark = results.fingerprint(path, parameters)
    result = results.read_result(path.stem, profile)
    if not result or not results.still_holds(result, mark, path, profile):
        text = f"no finished run of this notebook at profile {profile.name}"
        return [(path, text)]
    problems = run_problems(path, profile, options.strict)
    if options.strict:
        for text in verdicts.problems_of(path, "laptop", strict=True):
            problems.append((path, text))
    return problems


def report(options: Namespace, profile: Profile) -> Problems:
    """Write the report and say where it is."""
    from course.report import write_index

    print(f"report: {short_path(write_index(profile))}")
    return []


def sync(options: Namespace, profile: Profile) -> Problems:
    """Write everything generated."""
    from course import generate

    written = ", ".join(map(short_path, generate.sync()))
    print("written:", written or "nothing, all is up to date")
    return []


def keep(options: Namespace, profile: Profile) -> Problems:
    """Make the last run the record."""
    from course.report import commit, keep

    ours = commit()  # before the records change the checkout
    names = ", ".join(keep(profile, select(options.only)))
    print(f"kept at commit {ours}: {names}")
    return sync(options, profile)


def elsewhere(options: Namespace, profile: Profile) -> Problems:
    """Run in other environments."""
    from course.elsewhere import run

    return run(options.names, options.only, options.renew)


def publish(options: Namespace, profile: Profile) -> Problems:
    """Write the lessons' copies."""
    from course.publish import publish

    folder = build_folder() / "publish"
    print(f"{len(publish(folder))} copies: {short_path(folder)}")
    return []


def make(options: Namespace) -> int:
    """Set up; says so where there is nothing to do."""
    done = setup.run(options.torch, options.tests)
    if options.site:
        done = setup.install_site_tools() or done
    if not done:
        print("set up already")
    return 0


def examine(options: Namespace) -> int:
    """Say what this machine has and what it lacks."""
    from course import doctor

    return doctor.run()


def fetch(options: Namespace) -> int:
    """Fetch or list assets."""
    from course import fetch

    fetch.run(options.names, options.only, options.list, options.fresh)
    return 0


def lab(options: Namespace) -> int:
    """Fetch what one lesson takes, and open it."""
    from course import lab

    return lab.run(options.only)


def work(options: Namespace) -> int:
    """Make or renew a learner's own copies."""
    from course import work

    return work.run()


def student(options: Namespace) -> int:
    """Write the lessons for a class."""
    from course.publish import student

    folder = Path(options.names[0])
    copies = student(folder, select(options.only))
    print(f"{len(copies)} lessons without solutions: {short_path(folder)}")
    return 0


def grade(options: Namespace) -> int:
    """Judge what a class has handed in."""
    from course import grade

    return grade.run(Path(options.names[0]), options.only)


def translations(options: Namespace) -> int:
    """Say how far the translations are."""
    from course.site import languages

    for language in languages.NAMES if options.renew else ():
        for page in languages.catalogues():
            languages.renew(language, page)
    lines = languages.report()
    print("\n".join(lines))
    behind = any(line.startswith(" ") for line in lines)
    return int(options.strict and behind)


def site(options: Namespace) -> int:
    """Build the pages, and show them on request."""
    from course.site import build

    folder = build.build()
    if options.serve:
        build.serve(folder)
    return 0


def chore(options: Namespace) -> int:
    """What a maintainer does besides."""
    from course import chores

    return chores.run(options)


EARLY = {"setup": make, "doctor": examine, "fetch": fetch, "lab": lab, "work": work}
EARLY |= {"site": site, "student": student, "grade": grade}
EARLY |= {"translations": translations}
ACTIONS = {"run": run, "check": check, "report": report, "sync": sync, "keep": keep}
ACTIONS |= {"elsewhere": elsewhere, "publish": publish}
CHORES = dict.fromkeys(
    ["test", "slow-tests", "style", "bench", "faults", "release-check", "clean"],
    chore,
)


def need_packages(action: str) -> None:
    """An error that says how to get the packages, where this Python has none."""
    bare = action in ("setup", "doctor", "clean")
    if bare or importlib.util.find_spec("filelock"):
        return
    python = setup.interpreter()
    where = (
        f"{short_path(Path(sys.executable))} (the course's is {short_path(python)})"
    )
    fix = f"python3 -m course setup, then {short_path(python)} -m course {action}"
    raise CourseError("this Python has no packages of the course", where, fix)


def main(arguments: list[str] | None = None) -> int:
    """Do one thing; 0: all is well, 1: something is off, 2: not done at all, 130: interrupted."""
    tolerate_narrow_consoles()
    options = parse(arguments)
    try:
        need_packages(options.action)
        if options.action not in ACTIONS:
            return {**EARLY, **CHORES}[options.action](options)
        profile, reason = choose_profile(options.profile)
        if options.action == "run":
            print(f"profile {profile.name} ({reason})", flush=True)
        problems = ACTIONS[options.action](options, profile)
    except CourseError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        way = "the same command goes on with what is not yet done"
        print(f"\ninterrupted: {way}", file=sys.stderr)
        return 130
    for path, problem in problems:
        print(f"✘ {path.stem}: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
