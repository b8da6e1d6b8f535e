"""What services import, by names of modules."""

import subprocess
import sys

SERVICES = ("executor", "gateway", "health_monitor", "scheduler")


def test_no_service_imports_rich_or_torch() -> None:
    """Rich and Pygments draw tracebacks in colours, which no service does; PyTorch is for ranks."""
    code = (
        f"import sys, {', '.join(f'services.{name}.__main__' for name in SERVICES)}; "
        "print([name for name in ('rich', 'pygments', 'torch', 'transformers') if name in sys.modules])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"
