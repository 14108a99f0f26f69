"""All that is to be known of a GPU, in parts of at most nine minutes each: `make gpu`.

Each part is a command of its own, and what it finds is written as soon as it is there, to `<out>/gpu_<hardware>.jsonl`.
A part whose packages are missing is left out, and the others run. Stopped or killed, the command goes on with the parts
that are left, and with the rows that are left of one; what was taken of the same code on the same card, on whatever
day, is not taken again. `--lease MINUTES` is for a GPU that is there for so long. docs/gpu.md says what each line
means.

The status is 0 where all parts are done, 1 where some are not, 2 where none can run.

    python -m benchmarks.gpu.gpu --lease 15 --wheels wheels
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import record
from benchmarks.gpu import parts as gpu_parts
from benchmarks.gpu.parts import ROOT, Part
from benchmarks.gpu.runner import VERSIONS, Runner, say
from benchmarks.gpu.site import CPU, card, environment, missing, short, unpack

WARM_UP = ("-m", "benchmarks.gpu.warm")


def plan(
    parts: Sequence[Part], lacking: Mapping[str, Sequence[str]], done: set[str], *, minutes: float = float("inf")
) -> list[str]:
    """Return, in words, what would run in which order, with which limits, and what each part lacks."""
    bound = "" if minutes == float("inf") else f", each only if its limit fits into what is left of {minutes:g} minutes"
    lines = [f"make gpu takes these parts in this order{bound}:"]
    width, left = max(len(part.name) for part in parts), 60 * minutes
    nobody_can = all(lacking[part.name] for part in parts)
    for number, part in enumerate(parts, 1):
        notes = []
        if part.name in done:
            notes.append("done")
        elif nobody_can or not lacking[part.name]:
            fits = part.seconds <= left
            left -= part.seconds if fits else 0
            notes += [] if fits else ["left, unless others end before their limits"]
        notes += [f"lacks {', '.join(lacking[part.name])}"] if lacking[part.name] and part.name not in done else []
        line = f"{number:3}  {part.name:{width}}  {part.seconds:4g} s  {part.question}"
        lines.append(f"{line} ({'; '.join(notes)})" if notes else line)
    return lines


def main(words: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    arguments, known = parse(words)
    site = arguments.work / "site"
    unpack(arguments.wheels, site)
    variables = environment(
        site,
        folder=arguments.work,
        server=arguments.server,
        variables=arguments.environment,
        on_cpu=arguments.on_cpu,
    )
    name = CPU if arguments.on_cpu else card(variables)
    chosen = [part for part in known if not arguments.only or part.name in arguments.only]
    if arguments.on_cpu:
        chosen = [gpu_parts.on_cpu(part) for part in chosen]
    lacking = {part.name: missing(part, has_card=name not in (None, CPU)) for part in chosen}
    file = arguments.out / f"gpu_{arguments.hardware or short(name or 'none')}.jsonl"
    runner = Runner(file, environment=variables, folder=arguments.work, card=name or "")
    done = {part.name for part in chosen if part.name not in arguments.again and runner.is_done(part)}
    for line in plan(chosen, lacking, done, minutes=arguments.lease):
        say(line)
    able = [part for part in chosen if not lacking[part.name]]
    if not able:
        say(f"None of them can run here; packages that are missing are looked for as wheels in {arguments.wheels}.")
        return 2
    if arguments.plan:
        return 0
    runner.write({"part": "machine", "card": name, "versions": record.versions((*VERSIONS, "lightning", "numba"))})
    warm_up = () if arguments.on_cpu else WARM_UP
    left = arguments.lease - (time.monotonic() - began) / 60
    runner.run(able, again=arguments.again, minutes=left, warm_up=warm_up)
    return 0 if all(runner.is_done(part) for part in chosen) else 1


def parse(words: Sequence[str] | None) -> tuple[argparse.Namespace, list[Part]]:
    """Return the arguments, and all parts as they say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lease", type=float, default=float("inf"), metavar="MINUTES", help="how long the GPU is there"
    )
    parser.add_argument("--plan", action="store_true", help="say what would run, and end")
    parser.add_argument("--on-cpu", action="store_true", help="small forms of the parts, whose times mean nothing")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART")
    parser.add_argument("--again", nargs="+", default=[], metavar="PART", help="parts to repeat")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the lines")
    parser.add_argument("--hardware", help="name of the machine in the file's name (the card's)")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="folder of wheels (wheels)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu", help="folder for outputs (build/gpu)")
    parser.add_argument("--server", nargs="*", default=[], metavar="KEY=VALUE", help="further arguments of SGLang")
    parser.add_argument("--environment", nargs="*", default=[], metavar="NAME=VALUE", help="variables of its processes")
    arguments = parser.parse_args(words)
    known = gpu_parts.parts(server=arguments.server, variables=arguments.environment)
    unknown = {*arguments.only, *arguments.again} - {part.name for part in known}
    if unknown:
        parser.error(f"{sorted(unknown)}: expected parts of {[part.name for part in known]}")
    return arguments, known


if __name__ == "__main__":
    sys.exit(main())
