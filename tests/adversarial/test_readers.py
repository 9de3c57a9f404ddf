"""Every module that reads files has a test here that gives it broken ones."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import cocoa_engine
from cocoa_engine.lab import files

READ_WITH = {
    *(name for name in vars(files) if name.startswith("read_")),
    *("read_text", "read_bytes", "read_note", "read_records", "read_lines", "read_table", "model_validate_json"),
    *("GGUFReader", "ParquetFile", "safe_open", "load_file", "cached_file", "get_config_dict", "from_pretrained"),
    *("memmap", "fromfile", "open", "fdopen"),
}
"""Functions that read a file, wherever they come from."""
LOADERS = {"json", "np", "numpy", "pickle", "torch", "tomllib", "yaml"}
"""Modules whose ``load`` reads one."""
NO_READERS = {"CocoaEngine", "Embedding", "backend"}
"""What loads or opens what another module reads, or nothing that is a file."""

TARGETS = {
    "test_settings": "cocoa_engine/arguments.py",
    "test_calibrators": "cocoa_engine/risk/calibrator.py",
    "test_broken_files_of_the_cache_are_as_good_as_none": "cocoa_engine/cache_directory.py "
    "cocoa_engine/methods/retrieval_heads.py cocoa_engine/model/gguf_tokenizer.py "
    "cocoa_engine/model/weight_identity.py",
    "test_files_of_data": "cocoa_engine/cli/calibrate.py cocoa_engine/cli/prompting.py cocoa_engine/lab/files.py "
    "cocoa_engine/lab/stopping.py cocoa_engine/lab/data.py",
    "test_rows_to_score": "cocoa_engine/cli/score.py",
    "test_parquet": "cocoa_engine/lab/files.py cocoa_engine/lab/data.py",
    "test_labels_of_words": "cocoa_engine/lab/data.py",
    "test_caches_of_answers": "cocoa_engine/lab/cache.py",
    "test_checksums_of_the_kernels": "cocoa_engine/execution/native/build.py",
    "test_retrieval_heads": "cocoa_engine/methods/retrieval_heads.py",
    "test_gguf_files": "cocoa_engine/model/gguf_model.py cocoa_engine/model/gguf_reader.py "
    "cocoa_engine/model/loading.py",
    "test_configs_of_models": "cocoa_engine/model/loading.py cocoa_engine/model/configs.py",
    "test_weights_and_their_index": "cocoa_engine/model/loading.py cocoa_engine/model/quantised_weights.py",
    "test_tokenizer_files": "cocoa_engine/model/loading.py cocoa_engine/model/checkpoint_files.py",
    "test_chat_templates": "cocoa_engine/model/loading.py",
    "test_each_value_of_a_tokenizer_s_files": "cocoa_engine/model/checkpoint_files.py",
    "test_labels_of_people": "cocoa_integrations/evaluation/agreement.py",
    "test_data_of_tasks": "cocoa_integrations/evaluation/tasks.py cocoa_integrations/evaluation/files.py",
    "test_files_of_a_run": "cocoa_integrations/evaluation/judge.py cocoa_integrations/evaluation/harness.py",
    "test_finished_rows_of_a_cluster": "cocoa_integrations/ray/jobs.py",
    "test_files_of_api_keys": "cocoa_integrations/server/command.py",
}
"""The modules that each test gives broken files to."""

WITHOUT = {
    "cocoa_engine/cli/app.py": "/dev/null, which it writes to",
    "cocoa_engine/confined.py": "files of /proc and /dev",
    "cocoa_engine/output_files.py": "files that it writes to",
    "cocoa_engine/execution/backends/unshared.py": "its own place for keys and values, which it opens",
    "cocoa_engine/rendering/html.py": "a file of the package",
    "cocoa_engine/lab/self_made.py": "a file of the package",
    "cocoa_engine/lab/timing.py": "/proc/cpuinfo",
    "cocoa_integrations/chat_service/local.py": "a stream of the engine, which it opens",
    "cocoa_integrations/llama_index/llm.py": "a stream of the engine, which it opens",
    "cocoa_integrations/llama_index/callbacks.py": "a stream of the engine, which it opens",
    "cocoa_integrations/evaluation/command.py": "only the digest of the bytes",
    "cocoa_integrations/evaluation/table.py": "a file of the package",
    "cocoa_integrations/server/routes/page.py": "files of the package",
}


def _called(node: ast.expr) -> tuple[str, str]:
    """The names of a function and of what it belongs to."""
    if isinstance(node, ast.Attribute):
        return node.attr, _called(node.value)[0]
    return (node.id, "") if isinstance(node, ast.Name) else ("", "")


def reads(node: ast.AST) -> bool:
    """Whether something reads or opens a file."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return False
    name, owner = _called(node)
    return owner not in NO_READERS and (name in READ_WITH or (name == "load" and owner in LOADERS))


@pytest.mark.slow
def test_every_module_that_reads_files_is_given_broken_ones() -> None:
    root = Path(cocoa_engine.__file__).parents[1]
    found = {
        path.relative_to(root).as_posix()
        for package in ("cocoa_engine", "cocoa_integrations")
        for path in (root / package).rglob("*.py")
        if any(map(reads, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }
    targets = {module for modules in TARGETS.values() for module in modules.split()}
    assert found == targets | WITHOUT.keys(), "add a test with broken files, or say why there is none"
    written = {
        node.name
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    assert TARGETS.keys() <= written
