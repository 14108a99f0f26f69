"""The refused arguments of a server, against those that SGLang has."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rhymerl.backends.sglang.arguments import check, check_for_ranks

pytestmark = pytest.mark.sglang
NAMES = """
import argparse
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(*{option.removeprefix("--") for action in parser._actions for option in action.option_strings})
"""


def refusal(name: str) -> str | None:
    try:
        check({name: 2})
        check_for_ranks({name: 2})
    except ValueError as error:
        return str(error)
    return None


def test_no_whole_name_is_taken_for_the_beginning_of_a_refused_one():
    printed = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=True).stdout
    names = printed.splitlines()[-1].split()
    assert len(names) > 400
    refused = {name: why for name in names if (why := refusal(name)) is not None}
    assert not [why for why in refused.values() if "may read as" in why]
    assert {"model", "max-running-requests", "dp-size", "api-key", "nccl-init-addr", "config"} <= refused.keys()
