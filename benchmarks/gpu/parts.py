"""The parts of `gpu.py`: a command each, how long it may take, what it needs, and which files its figures judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.record import ROOT

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
OF_UPDATE = ("rhymerl/training", "rhymerl/algos", "rhymerl/models", "rhymerl/distributed", "rhymerl/types.py")
WITH_POLICY = ("bare", "peaked_policy", "device_time")  # scripts
WITH_SERVERS = ("sglang_servers", "sglang_work", "bare", "peaked_policy")

_SHOWN = ("-v", "-W", "default", "--disable-warnings", "--timeout=240", "-p", "no:cacheprovider")
PYTEST = ("-m", "pytest", *_SHOWN, "-m", "gpu")
SMALL = "--size 0.5B --running 8 128 32 --memory 0.3"  # of a table


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

    @classmethod
    def of(
        cls,
        script: str,
        question: str,
        words: str = "",
        *asked: str,
        name: str = "",
        needs: tuple[str, ...] = ENGINE,
        beside: tuple[str, ...] = (),
        judges: tuple[str, ...] = (),
        small: str | None = None,
        **more: Any,
    ) -> Part:
        """Return a script of this folder, with those `beside` it that it imports, and its options as on a line."""
        command = ("-m", f"benchmarks.gpu.{script}")
        return cls(
            name=name or script,
            question=question,
            words=(*command, *words.split(), *asked),
            needs=needs,
            judges=(*(f"benchmarks/gpu/{each}.py" for each in (script, *beside)), *judges),
            small=None if small is None else (*command, *small.split()),
            compiles="numba" in needs and "sglang" not in needs,
            **more,
        )


def parts(*, server: Sequence[str] = (), variables: Sequence[str] = ()) -> list[Part]:
    """Return all parts in the order in which they run: a GPU may be there for a quarter of an hour only.

    The first ones need nothing but torch and transformers and wait for no compiler.
    """
    asked = _asked(server, variables)
    history = "what does history bring inside SGLang at"
    large = "--size 7B --running 8 128 --num-prompts 32 --memory 0.4 --minutes 3.5"
    return [
        *_of_the_machine(),
        *_of_the_engine("0.5B", seconds=55),
        _table(
            "0.5B", f"{history} 0.5B?", f"{SMALL} --minutes 4.8 --modes none history_tree stock", asked, seconds=320
        ),
        _table("7B", f"{history} 7B?", f"{large} --modes none history_tree", asked, seconds=240),
        *_of_the_trainer(asked),
        *_of_the_engine("7B", seconds=90),
        *_of_the_engine("1.5B", seconds=60),
        _embedded(),
        _costs([*graphs(server), *server], variables),
        *_rest(asked),
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
        Part.of(
            "machine",
            "what does the GPU itself do?",
            seconds=15,
            needs=("torch",),
            beside=("device_time",),
            small="--copy-mib 1 --matrix 32 --repeats 2",
        ),
        Part.of(
            "draw_kernel",
            "what does the keyed draw cost?",
            "--rows 8 64 1024 --vocabularies 151936 --repeats 5 --calls 3",
            name="draw",
            seconds=25,
            needs=("torch", "triton"),
            judges=DRAW,
        ),
        Part.of(
            "passes",
            "what is a forward pass of 0.5B and of 7B, by its tokens?",
            "--sizes 0.5B 7B",
            seconds=70,
            needs=MODEL,
            beside=WITH_POLICY,
            small="--sizes tiny --counts 1 4 8 --repeats 1 --threads 1",
        ),
        Part(
            name="tests",
            question="do the tests of a GPU pass?",
            words=(*PYTEST, *tests),
            seconds=50,
            needs=TESTS,
            judges=(*OF_ENGINE, "rhymerl/training/offload.py", "rhymerl/testing.py", *tests),
            compiles=True,
        ),
    ]


def _of_the_engine(size: str, *, seconds: float) -> list[Part]:
    ending = "" if size == "0.5B" else f"-{size}"
    few = "--size tiny --tokens 12 --threads 1 --running 1 3"
    return [
        Part.of(
            "engine",
            f"what is a pass of the embedded engine at {size}, in time, launches and waits?",
            f"--size {size}",
            name=f"engine{ending}",
            seconds=seconds,
            beside=WITH_POLICY,
            judges=(*OF_ENGINE, "rhymerl/bench/costs.py"),
            small=None if ending else f"{few} --nodes 0 2 --passes 3",
        ),
        Part.of(
            "drafts",
            f"what does history bring to the embedded engine at {size}?",
            f"--size {size}",
            name=f"drafts{ending}",
            seconds=seconds,
            beside=WITH_POLICY,
            judges=OF_ENGINE,
            small=None if ending else few,
        ),
    ]


def _table(ending: str, question: str, words: str, asked: Sequence[str], *, seconds: float) -> Part:
    how = "--dtype bfloat16 --repeats 1 --nodes 16 --in-turns --start-timeout-s 120"
    return Part.of(
        "sglang_throughput",
        question,
        f"{how} {words}",
        *asked,
        name=f"table-{ending}",
        seconds=seconds,
        needs=TABLE,
        beside=WITH_SERVERS,
        judges=OF_SGLANG,
        only_after=None if ending == "0.5B" else "table-0.5B",
    )


def _of_the_trainer(asked: Sequence[str]) -> list[Part]:
    tiny = "--size tiny --threads 1 --tokens 8"
    short = "trainer.max_steps=1 data.prompts_per_step=2 rollout.group_size=2 rollout.max_tokens=8"
    return [
        Part.of(
            "update",
            "what does an update take, with shared prompts and without?",
            seconds=35,
            beside=WITH_POLICY,
            judges=("benchmarks/update/optimizer_step.py", *OF_UPDATE),
            small=f"{tiny} --samples 4 --repeats 1",
        ),
        Part.of(
            "peer",
            "how fast is transformers' generate_batch?",
            seconds=35,
            needs=MODEL,
            beside=WITH_POLICY,
            small=f"{tiny} --running 2",
        ),
        Part.of(
            "fsdp2",
            "does FSDP2 run on one GPU?",
            seconds=60,
            needs=SETTINGS,
            judges=(*OF_UPDATE, *OF_ENGINE, "rhymerl/backends/embedded.py"),
            small=f"-- {short} task.train_size=4 task.validation_size=2",
        ),
        Part.of(
            "steps",
            "what does history bring to a training step with SGLang?",
            "--size 0.5B --minutes 3.5",
            *asked,
            seconds=240,
            needs=(*SETTINGS, "sglang"),
            beside=("peaked_policy",),
            judges=(*OF_SGLANG, *OF_UPDATE, "rhymerl/rollout"),
            only_after="table-0.5B",
        ),
    ]


def _embedded() -> Part:
    modes = "--modes embedded --baseline embedded --repeats 1 --epochs 0"
    tiny = "--size tiny --running 2 --num-prompts 2 --group-size 2 --max-tokens 8"
    return Part.of(
        "sglang_throughput",
        "how fast is the embedded engine at the tables' work?",
        f"--dtype bfloat16 --size 0.5B --running 8 128 32 --minutes 1 {modes}",
        name="embedded",
        seconds=90,
        needs=tuple(each for each in TABLE if each not in ("sglang", "omegaconf")),
        beside=WITH_SERVERS,
        judges=(*OF_ENGINE, "rhymerl/backends/embedded.py"),
        small=f"{tiny} --threads 1 {modes}",
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
    return [
        _table(
            "n-grams",
            "what do n-grams bring inside SGLang at 0.5B, ours and its own?",
            f"{SMALL} --minutes 6 --modes none ours_ngram ngram",  # the last one may be cut off
            asked,
            seconds=420,
        ),
        Part(
            name="tests-sglang",
            question="do the tests of SGLang on a GPU pass?",
            words=(*PYTEST, *tests),
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
