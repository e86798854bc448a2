"""Compiling kernels: cached by content, and absent without a compiler."""

import ctypes

import numpy as np
import pytest

from penstock.actors.generator.kv_cache import huge_zeros
from penstock.kernels import native
from penstock.kernels.decode.layout import pack


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    native.load_library.cache_clear()
    yield tmp_path / "cache" / "native"
    native.load_library.cache_clear()


@pytest.mark.skipif(native.find_compiler() is None, reason="no C compiler")
def test_a_source_is_compiled_once_and_again_when_it_changes(empty_cache, tmp_path):
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return 41; }")
    assert native.load_library(source).answer() == 41
    (first,) = empty_cache.iterdir()
    written = first.stat().st_mtime_ns
    native.load_library.cache_clear()
    native.load_library(source)
    assert first.stat().st_mtime_ns == written
    source.write_text("int answer(void) { return 42; }")
    native.load_library.cache_clear()
    assert native.load_library(source).answer() == 42
    assert len(list(empty_cache.iterdir())) == 2


@pytest.mark.skipif(native.find_compiler() is None, reason="no C compiler")
def test_a_source_that_does_not_compile_leaves_nothing(empty_cache, tmp_path, caplog):
    source = tmp_path / "broken.c"
    source.write_text("int answer(void) { return ")
    assert native.load_library(source) is None
    assert list(empty_cache.iterdir()) == []
    assert "broken.c: compilation failed" in caplog.text


def test_no_compiler_means_no_library(empty_cache, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    source = tmp_path / "answer.c"
    source.write_text("int answer(void) { return 41; }")
    assert native.load_library(source) is None
    assert "answer.c: no C compiler" in caplog.text


def test_packing_keeps_every_weight_in_its_panel():
    matrix = np.random.default_rng(0).random((3, 40, 5), dtype=np.float32)
    packed = pack(matrix)
    assert packed.shape == (3, 2, 5, 32)
    for row in range(40):
        np.testing.assert_array_equal(packed[:, row // 32, :, row % 32], matrix[:, row])
    assert not packed[:, 1, :, 8:].any()


def test_huge_zeros_is_writable_and_aligned():
    array = huge_zeros((3, 1000, 700), np.float32)
    assert array.shape == (3, 1000, 700)
    assert not array.any()
    array[2, 999, 699] = 1.0
    assert array.sum() == 1.0
    assert ctypes.c_void_p(array.ctypes.data).value % 4096 == 0
