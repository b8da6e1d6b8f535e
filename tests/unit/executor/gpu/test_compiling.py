from types import SimpleNamespace

from services.executor.platforms.cuda import LONGEST, excuse_compiling


def test_a_rank_is_excused_while_a_kernel_is_compiled_and_not_after() -> None:
    runtime = SimpleNamespace(jit_cache_hook=None, jit_post_compile_hook=None)
    excused: list[float] = []
    excuse_compiling(excused.append, runtime)
    assert not runtime.jit_cache_hook(key="k", fn=None), "else Triton would not compile it"
    assert excused == [LONGEST]
    runtime.jit_post_compile_hook(key="k", fn=None)
    assert excused == [LONGEST, 0.0]


def test_hooks_that_were_there_are_called_too() -> None:
    runtime = SimpleNamespace(
        jit_cache_hook=lambda **about: about["key"], jit_post_compile_hook=lambda **about: about["key"]
    )
    excuse_compiling(lambda seconds: None, runtime)
    assert runtime.jit_cache_hook(key="before") == "before"
    assert runtime.jit_post_compile_hook(key="after") == "after"
