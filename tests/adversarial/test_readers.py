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
    *("memmap", "fromfile"),
}
"""Functions that read a file, wherever they come from."""
LOADERS = {"json", "np", "numpy", "pickle", "torch", "tomllib", "yaml", "gzip", "io", "os", "bz2", "lzma"}
"""Modules whose ``load`` or ``open`` reads one."""
NO_READERS = {"CocoaEngine", "Embedding"}
"""Classes whose ``from_pretrained`` is called for what another module reads, or reads nothing."""

TARGETS = {
    "cocoa_engine/arguments.py": ["test_settings"],
    "cocoa_engine/cache_directory.py": ["test_broken_files_of_the_cache_are_as_good_as_none"],
    "cocoa_engine/risk/calibrator.py": ["test_calibrators"],
    "cocoa_engine/cli/calibrate.py": ["test_questions_prompts_and_documents"],
    "cocoa_engine/cli/prompting.py": ["test_questions_prompts_and_documents"],
    "cocoa_engine/cli/score.py": ["test_rows_to_score"],
    "cocoa_engine/lab/files.py": ["test_labelled_data", "test_compressed_data", "test_parquet"],
    "cocoa_engine/lab/stopping.py": ["test_questions_prompts_and_documents"],
    "cocoa_engine/lab/data.py": [
        *("test_labelled_data", "test_labels_of_words", "test_questions_prompts_and_documents", "test_parquet"),
    ],
    "cocoa_engine/execution/native/build.py": ["test_checksums_of_the_kernels"],
    "cocoa_engine/methods/retrieval_heads.py": [
        "test_retrieval_heads",
        "test_broken_files_of_the_cache_are_as_good_as_none",
    ],
    "cocoa_engine/model/gguf_model.py": ["test_gguf_files"],
    "cocoa_engine/model/gguf_tokenizer.py": ["test_broken_files_of_the_cache_are_as_good_as_none"],
    "cocoa_engine/model/gguf_reader.py": ["test_gguf_files"],
    "cocoa_engine/model/weight_identity.py": ["test_broken_files_of_the_cache_are_as_good_as_none"],
    "cocoa_engine/model/loading.py": [
        *("test_configs_of_models", "test_weights_and_their_index", "test_tokenizer_files"),
        *("test_chat_templates", "test_gguf_files"),
    ],
    "cocoa_engine/model/configs.py": ["test_configs_of_models"],
    "cocoa_engine/model/checkpoint_files.py": ["test_tokenizer_files", "test_each_value_of_a_tokenizer_s_files"],
    "cocoa_engine/model/quantised_weights.py": ["test_weights_and_their_index"],
    "cocoa_engine/lab/cache.py": ["test_caches_of_answers"],
    "cocoa_integrations/evaluation/agreement.py": ["test_labels_of_people"],
    "cocoa_integrations/evaluation/tasks.py": ["test_data_of_tasks"],
    "cocoa_integrations/evaluation/files.py": ["test_data_of_tasks"],
    "cocoa_integrations/evaluation/judge.py": ["test_files_of_a_run"],
    "cocoa_integrations/evaluation/harness.py": ["test_files_of_a_run"],
    "cocoa_integrations/ray/jobs.py": ["test_finished_rows_of_a_cluster"],
    "cocoa_integrations/server/command.py": ["test_files_of_api_keys"],
}
"""The tests that give broken files to what a module reads."""

WITHOUT = {
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
    """Whether something reads a file, or opens one in a way that allows it."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        name, owner = _called(node)
        return name in READ_WITH and owner not in NO_READERS
    if not isinstance(node, ast.Call):
        return False
    name, owner = _called(node.func)
    if name == "load":
        return owner in LOADERS
    if name not in ("open", "fdopen"):
        return False
    texts = [one for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    if isinstance(node.func, ast.Attribute) and owner not in LOADERS and len(texts) < len(node.args):
        return False  # no path, whose `open` takes texts only
    modes = [*texts, *(one.value for one in node.keywords if one.arg == "mode")]
    written = [ast.literal_eval(one) for one in modes]
    return owner != "os" and not any(set(mode) & set("wax") and "+" not in mode for mode in written)


@pytest.mark.slow
def test_every_module_that_reads_files_is_given_broken_ones() -> None:
    root = Path(cocoa_engine.__file__).parents[1]
    found = {
        path.relative_to(root).as_posix()
        for package in ("cocoa_engine", "cocoa_integrations")
        for path in (root / package).rglob("*.py")
        if any(map(reads, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert found == {*TARGETS, *WITHOUT}, "add a test with broken files, or say why there is none"


def test_the_tests_with_broken_files_exist() -> None:
    written = {
        node.name
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    assert {name for names in TARGETS.values() for name in names} <= written
