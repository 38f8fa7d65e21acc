"""CUDA's driver API as far as judge and workers need it: memory that crosses a border, and four kernels of ours.

Imports torch and the standard library only: workers get a copy of this file beside worker.py.
"""

import ctypes
from pathlib import Path
from typing import Any

import torch

PINNED, POSIX_DESCRIPTOR, ON_DEVICE = 1, 1, 1
READ, READ_WRITE = 1, 3
MAPPED_TO_DEVICE = 2
BLOCK = 64
"""Bytes that one thread of `mask` takes: a block of ChaCha."""
GATE_SECONDS = 60
"""A gate that nobody opens gives way after that long, so that a dead judge leaves no kernel that runs for ever."""

OPENED, KEY, SUM_KEY, SUM, FINISHED, SCALARS = 0, 1, 5, 6, 7, 8
"""Places in the judge's page, in words: the number of the call whose gate is open, the keys of its inputs (4 words) and
of its checksum; from the device the checksum and the number of the call that has ended; the values of scalars."""

SOURCE = r"""
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ u64 now() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }

// Waits until the judge has written `number` into its page, then fetches the keys that lie behind it.
extern "C" __global__ void gate(const volatile u64 *page, u64 number, volatile u64 *key, u64 patience)
{
    u64 begun = now();
    while (page[OPENED] != number)
        if (now() - begun > patience) return;
    __threadfence_system();
    for (int i = 0; i < 5; i++) key[i] = page[KEY + i];
}

// to = from xor the key stream of ChaCha with 8 rounds: without the key no part of it can be known.
#define ROTATE(a, b) (((a) << (b)) | ((a) >> (32 - (b))))
#define QUARTER(a, b, c, d) \
    a += b; d = ROTATE(d ^ a, 16); c += d; b = ROTATE(b ^ c, 12); \
    a += b; d = ROTATE(d ^ a, 8); c += d; b = ROTATE(b ^ c, 7);
extern "C" __global__ void mask(const uint4 *from, uint4 *to, u64 blocks, const u32 *key)
{
    for (u64 n = blockIdx.x * (u64) blockDim.x + threadIdx.x; n < blocks; n += (u64) gridDim.x * blockDim.x) {
        u32 s[16] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574, key[0], key[1], key[2], key[3],
                     key[4], key[5], key[6], key[7], (u32) n, (u32) (n >> 32), 0, 0};
        u32 x[16];
        for (int i = 0; i < 16; i++) x[i] = s[i];
        for (int round = 0; round < 4; round++) {
            QUARTER(x[0], x[4], x[8], x[12]) QUARTER(x[1], x[5], x[9], x[13])
            QUARTER(x[2], x[6], x[10], x[14]) QUARTER(x[3], x[7], x[11], x[15])
            QUARTER(x[0], x[5], x[10], x[15]) QUARTER(x[1], x[6], x[11], x[12])
            QUARTER(x[2], x[7], x[8], x[13]) QUARTER(x[3], x[4], x[9], x[14])
        }
        for (int i = 0; i < 4; i++) {
            uint4 v = from[4 * n + i];
            v.x ^= x[4 * i] + s[4 * i]; v.y ^= x[4 * i + 1] + s[4 * i + 1];
            v.z ^= x[4 * i + 2] + s[4 * i + 2]; v.w ^= x[4 * i + 3] + s[4 * i + 3];
            to[4 * n + i] = v;
        }
    }
}

// The sum of all words, each times an odd number that follows from the last word of the key, into the judge's page, and
// then the number of the call. `state`, a sum and a count of blocks, is zero before and after.
extern "C" __global__ void checksum(const u64 *words, u64 count, const u64 *key, u64 *state, volatile u64 *page,
                                    u64 number)
{
    u64 total = 0;
    for (u64 n = blockIdx.x * (u64) blockDim.x + threadIdx.x; n < count; n += (u64) gridDim.x * blockDim.x) {
        u64 z = key[4] + n * 0x9e3779b97f4a7c15;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        total += words[n] * ((z ^ (z >> 31)) | 1);
    }
    for (int other = 16; other; other /= 2) total += __shfl_down_sync(~0u, total, other);
    if (threadIdx.x % 32 == 0) atomicAdd(state, total);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0 && atomicAdd(state + 1, 1ull) == gridDim.x - 1) {
        page[SUM] = atomicExch(state, 0ull);
        atomicExch(state + 1, 0ull);
        __threadfence_system();
        page[FINISHED] = number;
    }
}

extern "C" __global__ void spin(u64 nanoseconds)
{
    u64 begun = now();
    while (now() - begun < nanoseconds);
}
"""


class DriverError(RuntimeError):
    """A call of CUDA failed."""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", _Location), ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class Cuda:
    """The device that torch uses, in torch's own context."""

    def __init__(self) -> None:
        torch.cuda.synchronize()  # makes the context
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._location = _Location(ON_DEVICE, torch.cuda.current_device())
        self._processors = torch.cuda.get_device_properties(0).multi_processor_count
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), _compiled())
        self._kernels = {}
        for name in (b"gate", b"mask", b"checksum", b"spin"):
            self._kernels[name.decode()] = kernel = ctypes.c_void_p()
            self._call("cuModuleGetFunction", ctypes.byref(kernel), module, name)

    def create(self, size: int) -> "Memory":
        """New memory that others can map by its descriptor."""
        properties = _Properties(PINNED, POSIX_DESCRIPTOR, self._location)
        grain = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(properties), 0)
        whole = -(-max(size, 1) // grain.value) * grain.value
        handle, descriptor = ctypes.c_ulonglong(), ctypes.c_int()
        self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(whole), ctypes.byref(properties), _u64(0))
        self._call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, POSIX_DESCRIPTOR, _u64(0))
        return self._mapped(handle, whole, READ_WRITE, descriptor.value)

    def open(self, descriptor: int, size: int, *, writable: bool) -> "Memory":
        """Somebody else's memory, of `size` bytes in all, by the descriptor that was received."""
        handle = ctypes.c_ulonglong()
        self._call(
            "cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(descriptor), POSIX_DESCRIPTOR
        )
        return self._mapped(handle, size, READ_WRITE if writable else READ, descriptor)

    def _mapped(self, handle: ctypes.c_ulonglong, size: int, flags: int, descriptor: int) -> "Memory":
        address, bytes_ = ctypes.c_ulonglong(), ctypes.c_size_t(size)
        access = _Access(self._location, flags)
        self._call("cuMemAddressReserve", ctypes.byref(address), bytes_, ctypes.c_size_t(0), _u64(0), _u64(0))
        self._call("cuMemMap", address, bytes_, ctypes.c_size_t(0), handle, _u64(0))
        self._call("cuMemSetAccess", address, bytes_, ctypes.byref(access), ctypes.c_size_t(1))
        self._call("cuMemRelease", handle)  # the mapping keeps it
        return Memory(self, address.value, size, descriptor)

    def unmap(self, memory: "Memory") -> None:
        size = ctypes.c_size_t(memory.size)
        self._call("cuMemUnmap", _u64(memory.address), size)
        self._call("cuMemAddressFree", _u64(memory.address), size)

    def host(self, address: int, size: int) -> int:
        """Where the device finds this memory of the host, which is pinned for it."""
        found = ctypes.c_ulonglong()
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(size), MAPPED_TO_DEVICE)
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), ctypes.c_void_p(address), 0)
        return found.value

    def gate(self, page: int, number: int, key: torch.Tensor) -> None:
        self._launch("gate", 1, 1, page, number, key.data_ptr(), GATE_SECONDS * 10**9)

    def mask(self, source: int, target: int, size: int, key: torch.Tensor) -> None:
        """Both ways: what is masked twice is as before. `size` is a multiple of BLOCK."""
        self._launch("mask", 4 * self._processors, 256, source, target, size // BLOCK, key.data_ptr())

    def checksum(self, address: int, size: int, key: torch.Tensor, state: torch.Tensor, page: int, number: int) -> None:
        """Of `size` bytes, a multiple of 8, into the page, and `number` after it."""
        self._launch(
            "checksum", 4 * self._processors, 256, address, size // 8, key.data_ptr(), state.data_ptr(), page, number
        )

    def spin(self, seconds: float) -> None:
        self._launch("spin", 1, 1, round(seconds * 1e9))

    def _launch(self, kernel: str, blocks: int, threads: int, *arguments: int) -> None:
        """On torch's current stream; all arguments have 64 bits."""
        values = [ctypes.c_ulonglong(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self._call("cuLaunchKernel", self._kernels[kernel], blocks, 1, 1, threads, 1, 1, 0, stream, pointers, None)

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._driver, name)(*arguments):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'?').decode()}")


class Memory:
    """Device memory with an address here and a descriptor that others can map it by."""

    def __init__(self, cuda: Cuda, address: int, size: int, descriptor: int) -> None:
        self._cuda = cuda
        self.address = address
        self.size = size
        self.descriptor = descriptor

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def bytes(self) -> torch.Tensor:
        """A view of all of it."""
        return torch.as_tensor(self, device="cuda")

    def close(self) -> None:
        self._cuda.unmap(self)


def _compiled() -> bytes:
    """Machine code of SOURCE for this device, by the compiler that comes with torch."""
    folder = Path(torch.__file__).parents[1]
    [path, *_] = [*sorted(folder.glob("nvidia/*/lib/libnvrtc.so.*")), Path("libnvrtc.so")]
    nvrtc = ctypes.CDLL(str(path))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    places = f"enum {{ OPENED = {OPENED}, KEY = {KEY}, SUM = {SUM}, FINISHED = {FINISHED} }};\n"
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), (places + SOURCE).encode(), b"judge.cu", 0, None, None)
    target = b"--gpu-architecture=sm_%d%d" % torch.cuda.get_device_capability()
    if nvrtc.nvrtcCompileProgram(program, 1, (ctypes.c_char_p * 1)(target)):
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        raise DriverError(f"the judge's kernels do not compile: {log.value.decode()}")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, code)
    return code.raw


def _u64(value: int) -> ctypes.c_ulonglong:
    return ctypes.c_ulonglong(value)
