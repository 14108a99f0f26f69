"""All that is to be known of a GPU, in parts of at most nine minutes each: `make gpu`.

Each part is a command of its own, and what it finds is written as soon as it is there, to `<out>/gpu_<hardware>.jsonl`. Stopped or killed,
it goes on with the parts that are left; `--again PART` does one anew. A part that runs out of its time keeps the rows that it had. What the
environment lacks is taken from wheels in `--wheels`, without a network. docs/gpu.md says what each line means.

    python benchmarks/gpu.py --out benchmarks/results --hardware h100 --wheels wheels
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record

ROOT = Path(__file__).parent.parent
MODES = ("none", "history_tree", "stock", "ours_ngram", "ngram")  # the last ones are those that may be cut off
PACKAGES = (  # those of pyproject.toml and antlr4, which hydra needs; the engine; those of the tests
    *("torch", "transformers", "lightning", "hydra", "omegaconf", "antlr4", "numba", "numpy", "jinja2", "plotly"),
    *("rich", "safetensors", "tensorboard", "sglang", "pytest", "pytest_timeout", "hypothesis"),
)
SHAPE = (  # of 0.5B
    "model_type:qwen2,vocab_size:151936,hidden_size:896,num_hidden_layers:24,num_attention_heads:14,num_key_value_heads:2,"
    "intermediate_size:4864,max_position_embeddings:4096"
)
PLUGIN = "[sglang.srt.plugins]\nrhymerl = rhymerl.backends.sglang.plugin:register\n"
COSTS_OF = (
    *("backend=sglang", "backend.dtype=bfloat16", "model.path=null", f"+model.init={{{SHAPE}}}"),
    *("+measure.nodes=[15]", "+measure.rounds=1"),  # each number of nodes has an engine of its own
)
OF_TESTS = "RHYMERL_SGLANG_GPU"  # tests/sglang/test_gpu.py
STOP_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A command behind the interpreter, and the minutes that it may take."""

    name: str
    question: str
    words: tuple[str, ...]
    minutes: float


def parts(arguments: argparse.Namespace) -> list[Part]:
    """The most telling ones first: time on a GPU may end early."""
    engine = [*_given("--server", arguments.server), *_given("--environment", arguments.environment)]
    shown = ("-v", "-W", "default", "--disable-warnings", "--timeout=240", "-p", "no:cacheprovider")
    tests = ("-m", "pytest", *shown, "-m", "gpu", *gpu_tests())
    table = ("benchmarks/sglang_throughput.py", "--dtype", "bfloat16", "--repeats", "1", "--nodes", "16")
    small = ("--size", "0.5B", "--running", "8", "128", "32", "1", "--memory", "0.3", "--minutes", "6.5")
    large = ("--size", "7B", "--running", "8", "128", "--num-prompts", "32", "--memory", "0.4", "--minutes", "6")
    both = ("--size", "0.5B", "--running", "64", "--epochs", "0", "--minutes", "1.5")
    steps = ("benchmarks/gpu_steps.py", "--size", "0.5B", "--minutes", "4.5")
    return [
        Part(name="tests", question="do the tests of a GPU pass?", words=tests, minutes=5),
        Part(
            name="table-0.5B",
            question="what do drafts bring inside SGLang at 0.5B?",
            words=(*table, *small, "--in-turns", "--modes", *MODES, *engine),
            minutes=7.5,
        ),
        Part(
            name="draw",
            question="what does the keyed draw cost?",
            words=("benchmarks/draw_kernel.py", "--repeats", "5", "--calls", "3"),
            minutes=1,
        ),
        Part(
            name="steps",
            question="what does history bring to a training step?",
            words=(*steps, *engine),
            minutes=5,
        ),
        Part(
            name="embedded",
            question="how far is the embedded engine behind SGLang?",
            words=(*table, *both, "--modes", "none", "embedded", *engine),
            minutes=2,
        ),
        Part(
            name="costs",
            question="what does a pass cost?",
            words=("-m", "rhymerl", "bench", "costs", "--json", *COSTS_OF, *_settings(arguments)),
            minutes=2.5,
        ),
        Part(
            name="table-7B",
            question="what do drafts bring inside SGLang at 7B?",
            words=(*table, *large, "--in-turns", "--modes", *(mode for mode in MODES if mode != "stock"), *engine),
            minutes=7,
        ),
    ]


def gpu_tests() -> list[str]:
    """Return the files with tests of a GPU: to import all others takes long, and packages that a GPU's machine may lack."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "pytest.mark.gpu" in file.read_text()]


def _given(option: str, words: Sequence[str]) -> list[str]:
    return [option, *words] if words else []


def _settings(arguments: argparse.Namespace) -> list[str]:
    """Return the same further arguments as settings of `rhymerl`."""
    server = [f"+backend.arguments.{word}" for word in arguments.server]
    return [*server, *(f"+backend.environment.{word}" for word in arguments.environment)]


def missing(site: Path) -> list[str]:
    """Return what has to be there and is not; `site` has what came with the wheels."""
    if site.is_dir() and str(site) not in sys.path:
        sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    lacking = [f"the package {name}" for name in PACKAGES if importlib.util.find_spec(name) is None]
    if importlib.util.find_spec("torch") is not None:
        import torch

        if not torch.cuda.is_available():
            lacking.insert(0, "a GPU that torch sees")
    return lacking


def unpack(wheels: Path, site: Path) -> None:
    """Install the wheels into `site`, and tell SGLang of the plugin of this tree, which need not be installed."""
    files = sorted(map(str, wheels.glob("*.whl"))) if wheels.is_dir() else []
    if files and not (site / ".done").exists():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site))
        subprocess.run([*pip, *files], check=True)
        (site / ".done").touch()
    try:
        importlib.metadata.version("rhymerl")
    except importlib.metadata.PackageNotFoundError:
        about = site / "rhymerl-0.dist-info"
        about.mkdir(parents=True, exist_ok=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: rhymerl\nVersion: 0\n")
        (about / "entry_points.txt").write_text(PLUGIN)


def environment(site: Path, *, server: Sequence[str] = (), variables: Sequence[str] = ()) -> dict[str, str]:
    """Return that of the parts: the checkout and what came with the wheels, no network, and output that a kill does not swallow.

    Tests are told of SGLang's further arguments and variables by it.
    """
    path = os.pathsep.join([str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    of_machine = {"arguments": _values(server), "environment": dict(each.split("=", 1) for each in variables)}
    own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", OF_TESTS: json.dumps(of_machine)}
    return {**os.environ, **own}


def _values(words: Sequence[str]) -> dict[str, Any]:
    """Return KEY=VALUE with numbers and true or false as such."""
    found: dict[str, Any] = dict(word.split("=", 1) for word in words)
    for name, value in found.items():
        with suppress(ValueError):
            found[name] = json.loads(value)
    return found


class Session:
    """Runs parts, and writes down how each ended: a JSON object a line, the rows of a part before its end."""

    def __init__(self, file: Path, *, environment: Mapping[str, str], folder: Path) -> None:
        self.file = file
        self.environment = environment
        self.folder = folder  # for rows and outputs

    def lines(self) -> Iterator[dict[str, Any]]:
        """What is known; a line that a kill has broken off is no line."""
        for line in self.file.read_text().splitlines() if self.file.exists() else []:
            try:
                yield json.loads(line)
            except ValueError:
                continue

    def done(self) -> set[str]:
        """The parts that have ended, well or not."""
        return {line["part"] for line in self.lines() if "ended" in line}

    def run(self, chosen: Sequence[Part], *, again: Sequence[str] = (), minutes: float = float("inf")) -> None:
        """Run the parts that are left, as long as they fit into so many minutes."""
        ends = time.monotonic() + 60 * minutes
        left = [part for part in chosen if part.name in again or part.name not in self.done()]
        for part in left:
            if time.monotonic() + 60 * part.minutes > ends:
                say(f"{part.name}: {part.minutes:g} minutes do not fit any more")
                continue
            say(f"{part.name}: {part.question}")
            self._write({"part": part.name, "began": time.strftime("%Y-%m-%dT%H:%M:%S")})
            self._run(part)

    def _run(self, part: Part) -> None:
        rows, output = self.folder / f"{part.name}.rows", self.folder / f"{part.name}.out"
        self.folder.mkdir(parents=True, exist_ok=True)
        rows.unlink(missing_ok=True)
        begun, told = time.monotonic(), 0
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *part.words],
                cwd=ROOT,
                env={**self.environment, record.ROWS: str(rows)},
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=record.dying_with(os.getpid()),
            )
            try:
                while process.poll() is None and time.monotonic() - begun < 60 * part.minutes:
                    time.sleep(0.2)
                    told = self._tell(part, rows, told)
                code = process.poll()
            finally:
                _end(process)
        self._tell(part, rows, told)
        taken = round(time.monotonic() - begun, 1)
        words = output.read_text(errors="replace").splitlines()
        result = _json_of(words[-1]) if words else None
        last = {"result": result} if result is not None else {"output": words[-20:]}
        self._write({"part": part.name, "ended": "out of time" if code is None else code, "seconds": taken, **last})

    def _tell(self, part: Part, rows: Path, told: int) -> int:
        """Copy the rows that are new; returns how many there are."""
        lines = rows.read_text().splitlines() if rows.exists() else []
        found = [row for row in map(_json_of, lines) if row is not None]
        for row in found[told:]:
            self._write({"part": part.name, "row": row})
        return len(found)

    def _write(self, line: Mapping[str, Any]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        broken = self.file.exists() and not self.file.read_bytes().endswith(b"\n") and self.file.stat().st_size
        with self.file.open("a") as file:
            file.write(("\n" if broken else "") + json.dumps(line) + "\n")
        say(json.dumps(line))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with all that it has started."""
    for sign, patience in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            return
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def _json_of(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def say(line: str) -> None:
    print(line, flush=True)


def machine() -> dict[str, Any]:
    import torch

    versions = {}
    for name in ("torch", "transformers", "sglang", "triton", "lightning"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "-"
    return {"gpu": torch.cuda.get_device_name(), "python": sys.version.split()[0], **versions}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the lines")
    parser.add_argument("--hardware", default="gpu", help="name of the machine in the file's name")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="folder of wheels (wheels)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu", help="folder for outputs (build/gpu)")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART")
    parser.add_argument("--again", nargs="+", default=[], metavar="PART", help="parts to repeat")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no part that does not fit into these"
    )
    parser.add_argument("--server", nargs="*", default=[], metavar="KEY=VALUE", help="further arguments of SGLang")
    parser.add_argument("--environment", nargs="*", default=[], metavar="NAME=VALUE", help="variables of its processes")
    arguments = parser.parse_args(words)
    known = parts(arguments)
    unknown = {*arguments.only, *arguments.again} - {part.name for part in known}
    if unknown:
        parser.error(f"{sorted(unknown)}: expected parts of {[part.name for part in known]}")
    site = arguments.work / "site"
    unpack(arguments.wheels, site)
    chosen = [part for part in known if not arguments.only or part.name in arguments.only]
    if lacking := missing(site):
        would = ", ".join(part.name for part in chosen)
        say(f"make gpu would run {would}; missing: {', '.join(lacking)} (wheels are looked for in {arguments.wheels})")
        return 2
    file = arguments.out / f"gpu_{arguments.hardware}.jsonl"
    given = environment(site, server=arguments.server, variables=arguments.environment)
    session = Session(file, environment=given, folder=arguments.work)
    session._write({"part": "machine", "row": machine()})
    session.run(chosen, again=arguments.again, minutes=arguments.minutes)
    return 0 if session.done() >= {part.name for part in chosen} else 1


if __name__ == "__main__":
    sys.exit(main())
