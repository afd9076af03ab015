"""The test command of cosmic-ray, warm: tests of a mutant run in a fork of a process that has imported torch already.

    python results/mutants.py serve                     # in the mutated clone, with the project's interpreter
    test-command = "python .../mutants.py test PYTEST_ARGUMENTS"     # in cosmic-ray's configuration
    python results/mutants.py delete MODULE.py SECONDS PYTEST_ARGUMENTS    # each statement of a function left out
    python results/mutants.py list SESSION.sqlite DELETED.json ...         # what came of every mutant, a line each

A mutant costs its tests, not the ten seconds that importing torch, Triton and Transformers takes on a busy machine.
Only what is not of this project is imported before the fork, so each fork imports the mutated file. A fork dies with
whoever asked for it, so cosmic-ray's timeout ends the tests too.

cosmic-ray has no operator that leaves a statement out, so `delete` does: every simple statement in a function's body,
but for docstrings, becomes `pass`, one at a time, in place.
"""

import ast
import gc
import json
import os
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

ADDRESS = os.environ.get("MUTANTS_SOCKET", "/tmp/mutants.socket")


def serve() -> None:
    os.environ.update(TRITON_INTERPRET="1", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # seconds a run
    sys.path.insert(0, os.getcwd())
    sys.dont_write_bytecode = True
    import pytest
    import pytest_timeout  # noqa: F401
    import tokenizers  # noqa: F401
    import torch._dynamo
    import xxhash  # noqa: F401

    torch.compile(lambda x: x, backend="eager")  # imports a second's worth
    torch._dynamo.reset()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # pytest collects five times as it ends
    own = [
        name
        for name in sys.modules
        if name.partition(".")[0] in ("kernels", "engine", "experiments", "tests")
    ]
    assert not own, own
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    if os.path.exists(ADDRESS):
        os.unlink(ADDRESS)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(ADDRESS)
    listener.listen()
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        arguments = json.loads(connection.recv(1 << 16))

        def watch(connection=connection):
            select.select([connection], [], [])  # readable only when the other side is gone
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.close(writer)

        def forward(connection=connection, reader=reader):
            while data := os.read(reader, 1 << 16):
                connection.sendall(data)

        forwarding = threading.Thread(target=forward, daemon=True)
        forwarding.start()
        code = int(pytest.main(arguments))
        sys.stdout.flush()
        sys.stderr.flush()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        forwarding.join(5)
        connection.sendall(b"\0%d" % code)
        os._exit(0)


def test(arguments: list[str]) -> int:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(ADDRESS)
    connection.sendall(json.dumps(arguments).encode())
    received = b""
    while data := connection.recv(1 << 16):
        received += data
    output, _, code = received.rpartition(b"\0")
    sys.stdout.buffer.write(output)
    return int(code) if code.isdigit() else 99


def delete(module: str, seconds: float, arguments: list[str]) -> list[dict]:
    """What came of each mutant of module, the file being written in place and put back."""
    source = Path(module).read_text()
    lines = source.splitlines(keepends=True)
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    simple = (
        ast.Assign,
        ast.AugAssign,
        ast.AnnAssign,
        ast.Expr,
        ast.Return,
        ast.Delete,
        ast.Raise,
        ast.Assert,
    )
    found = {
        node.lineno: node
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, simple)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    }
    result = []
    for first, node in sorted(found.items()):
        changed = [*lines[: first - 1], " " * node.col_offset + "pass\n", *lines[node.end_lineno :]]
        Path(module).write_text("".join(changed))
        command = [sys.executable, "-S", __file__, "test", *arguments]
        try:
            code = subprocess.run(command, timeout=seconds, capture_output=True, check=False).returncode
            outcome = "killed" if code else "survived"
        except subprocess.TimeoutExpired:
            outcome = "timeout"
        finally:
            Path(module).write_text(source)
        text = " ".join(line.strip() for line in lines[first - 1 : node.end_lineno])
        result.append(
            {"module": module, "line": first, "operator": "DeleteStatement", "outcome": outcome, "text": text}
        )
        print(first, outcome, text, file=sys.stderr, flush=True)
    return result


def lines(path: str) -> Iterator[str]:
    """outcome, session, file:line, operator and the mutated lines of each mutant that was run, separated by tabs."""
    session = Path(path).stem
    if path.endswith(".json"):
        for row in json.loads(Path(path).read_text()):
            yield "\t".join(
                [row["outcome"], session, f"{row['module']}:{row['line']}", row["operator"], row["text"]]
            )
        return
    query = """
        SELECT m.module_path, m.start_pos_row, m.operator_name, r.test_outcome, r.output, r.diff
        FROM mutation_specs m JOIN work_results r ON m.job_id = r.job_id
        WHERE r.worker_outcome = 'NORMAL' ORDER BY 1, 2, 3, m.occurrence
    """
    for module, line, operator, outcome, output, diff in sqlite3.connect(path).execute(query):
        outcome = "timeout" if output == "timeout" else outcome.lower()
        changed = [text[1:].strip() for text in diff.splitlines() if text[:1] == "+" and text[:3] != "+++"]
        yield "\t".join(
            [outcome, session, f"{module}:{line}", operator.removeprefix("core/"), " ".join(changed)]
        )


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    elif sys.argv[1] == "test":
        sys.exit(test(sys.argv[2:]))
    elif sys.argv[1] == "delete":
        print(json.dumps(delete(sys.argv[2], float(sys.argv[3]), sys.argv[4:]), indent=0))
    else:
        for path in sys.argv[2:]:
            print(*lines(path), sep="\n")
