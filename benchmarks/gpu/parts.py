"""The parts of `gpu.py`: a command each, how long it may take, what it needs, and which files its figures judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHAPE = (  # of 0.5B
    "model_type:qwen2,vocab_size:151936,hidden_size:896,num_hidden_layers:24,num_attention_heads:14,num_key_value_heads:2,"
    "intermediate_size:4864,max_position_embeddings:4096"
)
COSTS_OF = (
    *("backend=sglang", "backend.dtype=bfloat16", "model.path=null", f"+model.init={{{SHAPE}}}"),
    *("+measure.nodes=[15]", "+measure.rounds=1"),  # each number of nodes has an engine of its own
)
# SGLang's own choice with drafts is 35 batch sizes up to 128, and our plugin captures graphs of several widths for
# each.
GRAPHS: Mapping[str, str] = {"cuda_graph_bs_decode": "[1,2,4,8,16,32,64,128]"}

# -- what has to be there, by the names of modules ---------------------------------------------------------------------

MODEL = ("torch", "transformers")
ENGINE = (*MODEL, "numba", "rich")
SETTINGS = (*ENGINE, "lightning", "hydra", "omegaconf", "antlr4", "plotly", "tensorboard", "safetensors", "jinja2")
TESTS = (*ENGINE, "lightning", "pytest", "pytest_timeout", "hypothesis")
TABLE = (*ENGINE, "lightning", "omegaconf", "sglang")


def _command(name: str) -> tuple[str, str]:
    return "-m", f"benchmarks.gpu.{name}"


def _scripts(*names: str) -> tuple[str, ...]:
    return tuple(f"benchmarks/gpu/{name}.py" for name in names)


# -- what figures judge ------------------------------------------------------------------------------------------------

DRAFTING = (
    "rhymerl/drafts.py",
    "rhymerl/drafters",
    "rhymerl/budgets",
    "rhymerl/history",
    "rhymerl/costs.py",
    "rhymerl/compiled.py",
)
DRAW = tuple(
    f"rhymerl/engine/{name}.py"
    for name in ("device_draw", "draw", "triton_draw", "triton_truncation", "truncation", "noise")
)
OF_ENGINE = ("rhymerl/engine", "rhymerl/models", "rhymerl/types.py", *DRAFTING)
OF_SGLANG = (
    *("rhymerl/backends/sglang", "rhymerl/backends/remote", "rhymerl/backends/base.py", "rhymerl/types.py"),
    *(*DRAW, *DRAFTING),
)
OF_TABLE = _scripts("sglang_throughput", "sglang_servers", "sglang_work", "bare", "peaked_policy")
OF_UPDATE = ("rhymerl/training", "rhymerl/algos", "rhymerl/models", "rhymerl/distributed", "rhymerl/types.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A command behind the interpreter, and the seconds that it may take."""

    name: str
    question: str
    words: tuple[str, ...]
    seconds: float
    needs: tuple[str, ...] = ()  # modules
    judges: tuple[str, ...] = ()  # files and folders whose content the figures are of
    small: tuple[str, ...] | None = None  # the command on a CPU; None: there is none
    needs_gpu: bool = True
    compiles: bool = False  # functions of numba
    only_after: str | None = None  # a part without whose rows this one would wait in vain


def parts(*, server: Sequence[str] = (), variables: Sequence[str] = ()) -> list[Part]:
    """Return all parts in the order in which they run: a GPU may be there for a quarter of an hour only.

    The first ones need nothing but torch and transformers and wait for no compiler.
    """
    return [
        *_of_the_machine(),
        *_of_the_engine("0.5B", seconds=(55, 55)),
        *_tables(_asked(server, variables)),
        *_of_the_trainer(),
        _steps(_asked(server, variables)),
        *_of_the_engine("7B", seconds=(90, 90)),
        *_of_the_engine("1.5B", seconds=(60, 60)),
        _embedded(),
        _costs([*graphs(server), *server], variables),
        *_rest(_asked(server, variables)),
    ]


def on_cpu(part: Part) -> Part:
    """Return the part as it runs on a CPU, where its times mean nothing; a part without such a form needs a GPU.

    A CPU may be busy with something else, so that the limit is another.
    """
    return part if part.small is None else replace(part, words=part.small, seconds=300, needs_gpu=False)


def gpu_tests(folder: str = "") -> list[str]:
    """Return the files with GPU tests: other files take long to import, and need packages that may be missing."""
    files = sorted((ROOT / "tests" / folder).rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "pytest.mark.gpu" in file.read_text()]


def _of_the_machine() -> list[Part]:
    tests = [each for each in gpu_tests() if each not in gpu_tests("sglang")]
    return [
        Part(
            name="machine",
            question="what does the GPU itself do?",
            words=_command("machine"),
            seconds=15,
            needs=("torch",),
            judges=_scripts("machine", "device_time"),
            small=(*_command("machine"), "--copy-mib", "1", "--matrix", "32", "--repeats", "2"),
        ),
        Part(
            name="draw",
            question="what does the keyed draw cost?",
            words=(
                *(*_command("draw_kernel"), "--rows", "8", "64", "1024", "--vocabularies", "151936"),
                *("--repeats", "5", "--calls", "3"),
            ),
            seconds=25,
            needs=("torch", "triton"),
            judges=(*_scripts("draw_kernel"), *DRAW),
        ),
        Part(
            name="passes",
            question="what is a forward pass of 0.5B and of 7B, by its tokens?",
            words=(*_command("passes"), "--sizes", "0.5B", "7B"),
            seconds=70,
            needs=MODEL,
            judges=_scripts("passes", "bare", "peaked_policy", "device_time"),
            small=(
                *(*_command("passes"), "--sizes", "tiny", "--counts", "1", "4", "8"),
                *("--repeats", "1", "--threads", "1"),
            ),
        ),
        Part(
            name="tests",
            question="do the tests of a GPU pass?",
            words=(*_pytest(), *tests),
            seconds=50,
            needs=TESTS,
            judges=(*OF_ENGINE, "rhymerl/training/offload.py", "rhymerl/testing.py", *tests),
            compiles=True,
        ),
    ]


def _pytest() -> tuple[str, ...]:
    shown = ("-v", "-W", "default", "--disable-warnings", "--timeout=240", "-p", "no:cacheprovider")
    return ("-m", "pytest", *shown, "-m", "gpu")


def _of_the_engine(size: str, *, seconds: tuple[float, float]) -> list[Part]:
    ending = "" if size == "0.5B" else f"-{size}"
    few = ("--size", "tiny", "--tokens", "12", "--threads", "1", "--running", "1", "3")
    shared = ("bare", "peaked_policy", "device_time")
    return [
        Part(
            name=f"engine{ending}",
            question=f"what is a pass of the embedded engine at {size}, in time, launches and waits?",
            words=(*_command("engine"), "--size", size),
            seconds=seconds[0],
            needs=ENGINE,
            judges=(*_scripts("engine", *shared), *OF_ENGINE, "rhymerl/bench/costs.py"),
            small=None if ending else (*_command("engine"), *few, "--nodes", "0", "2", "--passes", "3"),
            compiles=True,
        ),
        Part(
            name=f"drafts{ending}",
            question=f"what does history bring to the embedded engine at {size}?",
            words=(*_command("drafts"), "--size", size),
            seconds=seconds[1],
            needs=ENGINE,
            judges=(*_scripts("drafts", *shared), *OF_ENGINE),
            small=None if ending else (*_command("drafts"), *few),
            compiles=True,
        ),
    ]


def _tables(asked: Sequence[str]) -> list[Part]:
    small = ("--size", "0.5B", "--running", "8", "128", "32", "--memory", "0.3", "--minutes", "4.8")
    large = ("--size", "7B", "--running", "8", "128", "--num-prompts", "32", "--memory", "0.4", "--minutes", "3.5")
    return [
        Part(
            name="table-0.5B",
            question="what does history bring inside SGLang at 0.5B?",
            words=(*_table(), *small, "--modes", "none", "history_tree", "stock", *asked),
            seconds=320,
            needs=TABLE,
            judges=(*OF_TABLE, *OF_SGLANG),
        ),
        Part(
            name="table-7B",
            question="what does history bring inside SGLang at 7B?",
            words=(*_table(), *large, "--modes", "none", "history_tree", *asked),
            seconds=240,
            needs=TABLE,
            judges=(*OF_TABLE, *OF_SGLANG),
            only_after="table-0.5B",
        ),
    ]


def _table() -> tuple[str, ...]:
    how = ("--dtype", "bfloat16", "--repeats", "1", "--nodes", "16", "--in-turns", "--start-timeout-s", "120")
    return (*_command("sglang_throughput"), *how)


def _of_the_trainer() -> list[Part]:
    tiny = ("--size", "tiny", "--threads", "1", "--tokens", "8")
    short = ("trainer.max_steps=1", "data.prompts_per_step=2", "rollout.group_size=2", "rollout.max_tokens=8")
    shared = ("bare", "peaked_policy", "device_time")
    return [
        Part(
            name="update",
            question="what does an update take, with shared prompts and without?",
            words=_command("update"),
            seconds=35,
            needs=ENGINE,
            judges=(*_scripts("update", *shared), *OF_UPDATE),
            small=(*_command("update"), *tiny, "--samples", "4", "--repeats", "1"),
            compiles=True,
        ),
        Part(
            name="peer",
            question="how fast is transformers' generate_batch?",
            words=_command("peer"),
            seconds=35,
            needs=MODEL,
            judges=_scripts("peer", *shared),
            small=(*_command("peer"), *tiny, "--running", "2"),
        ),
        Part(
            name="fsdp2",
            question="does FSDP2 run on one GPU?",
            words=_command("fsdp2"),
            seconds=60,
            needs=SETTINGS,
            judges=(*_scripts("fsdp2"), *OF_UPDATE, *OF_ENGINE, "rhymerl/backends/embedded.py"),
            small=(*_command("fsdp2"), "--", *short, "task.train_size=4", "task.validation_size=2"),
            compiles=True,
        ),
    ]


def _steps(asked: Sequence[str]) -> Part:
    return Part(
        name="steps",
        question="what does history bring to a training step with SGLang?",
        words=(*_command("steps"), "--size", "0.5B", "--minutes", "3.5", *asked),
        seconds=240,
        needs=(*SETTINGS, "sglang"),
        judges=(*_scripts("steps", "peaked_policy"), *OF_SGLANG, *OF_UPDATE, "rhymerl/rollout"),
        only_after="table-0.5B",
    )


def _embedded() -> Part:
    modes = ("--modes", "embedded", "--baseline", "embedded", "--repeats", "1", "--epochs", "0")
    size = ("--dtype", "bfloat16", "--size", "0.5B", "--running", "8", "128", "32", "--minutes", "1")
    tiny = ("--size", "tiny", "--running", "2", "--num-prompts", "2", "--group-size", "2", "--max-tokens", "8")
    return Part(
        name="embedded",
        question="how fast is the embedded engine at the tables' work?",
        words=(*_command("sglang_throughput"), *size, *modes),
        seconds=90,
        needs=tuple(each for each in TABLE if each not in ("sglang", "omegaconf")),
        judges=(*OF_TABLE, *OF_ENGINE, "rhymerl/backends/embedded.py"),
        small=(*_command("sglang_throughput"), *tiny, "--threads", "1", *modes),
        compiles=True,
    )


def _costs(server: Sequence[str], variables: Sequence[str]) -> Part:
    settings = [
        *(f"+backend.arguments.{word}" for word in server),
        *(f"+backend.environment.{word}" for word in variables),
    ]
    return Part(
        name="costs",
        question="what does a pass cost inside SGLang?",
        words=("-m", "rhymerl", "bench", "costs", "--json", *COSTS_OF, *settings),
        seconds=150,
        needs=(*SETTINGS, "sglang"),
        judges=("rhymerl/bench/passes.py", "rhymerl/bench/sglang.py", *OF_SGLANG),
        only_after="table-0.5B",
    )


def _rest(asked: Sequence[str]) -> list[Part]:
    tests = gpu_tests("sglang")
    modes = ("--modes", "none", "ours_ngram", "ngram")  # the last one may be cut off
    return [
        Part(
            name="table-n-grams",
            question="what do n-grams bring inside SGLang at 0.5B, ours and its own?",
            words=(
                *(*_table(), "--size", "0.5B", "--running", "8", "128", "32", "--memory", "0.3", "--minutes", "6"),
                *(*modes, *asked),
            ),
            seconds=420,
            needs=TABLE,
            judges=(*OF_TABLE, *OF_SGLANG),
            only_after="table-0.5B",
        ),
        Part(
            name="tests-sglang",
            question="do the tests of SGLang on a GPU pass?",
            words=(*_pytest(), *tests),
            seconds=300,
            needs=(*TESTS, "sglang"),
            judges=(*OF_SGLANG, "rhymerl/engine", "tests/sglang/engines.py", *tests),
            only_after="table-0.5B",
        ),
    ]


def _asked(server: Sequence[str], variables: Sequence[str]) -> list[str]:
    """Return what benchmarks with servers are told: fewer graphs, unless somebody has chosen, and what was given."""
    return ["--server", *graphs(server), *server, *(["--environment", *variables] if variables else [])]


def graphs(server: Sequence[str]) -> list[str]:
    given = {word.partition("=")[0] for word in server}
    return [f"{name}={value}" for name, value in GRAPHS.items() if name not in given]
