"""A trusted solution that keeps the device busy for as many seconds as its last argument says; see blank.py."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from justgoal.evaluation.devices import cuda_driver
else:
    import cuda_driver

CUDA = cuda_driver.Cuda()


def run(*arguments: Any, out: Any) -> Any:
    if arguments[-1]:
        CUDA.spin(arguments[-1])
    return out
