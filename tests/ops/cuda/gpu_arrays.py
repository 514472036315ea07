"""Arrays on the GPU, of effinfer and as another library exports them."""

import ctypes
import os

import ml_dtypes
import numpy as np

import effinfer
from effinfer import DeviceArray

TYPES = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def there(x, device="cuda:0"):
    return DeviceArray.from_numpy(np.asarray(x), device)


def here(x):
    """A copy on the host, with ml_dtypes' names of the types that numpy lacks."""
    array = x.to_numpy()
    tag = array.dtype.metadata["effinfer"] if array.dtype.metadata else None
    names = {"bf16": "bfloat16", "f8_e4m3": "float8_e4m3fn", "f8_e5m2": "float8_e5m2"}
    return array if tag is None else array.view(TYPES[names[tag]])


class DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", DLDevice),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    pass


Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(Managed))
Managed._fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", Deleter))


class Versioned(ctypes.Structure):
    pass


VersionedDeleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(Versioned))
Versioned._fields_ = (
    ("major", ctypes.c_uint32),
    ("minor", ctypes.c_uint32),
    ("context", ctypes.c_void_p),
    ("deleter", VersionedDeleter),
    ("flags", ctypes.c_uint64),
    ("tensor", DLTensor),
)

new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Producer:
    """A float32 array of a library that nobody knows, over a DeviceArray's memory."""

    def __init__(self, x, *, versioned=True, device=(2, 0), flags=0, code=2, bits=32):
        self.array = there(x)
        self.versioned, self.device, self.flags = versioned, device, flags
        self.code, self.bits = code, bits
        self.streams = []
        self.exported = self.deleted = 0
        self._kept = []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, **options):
        if options and not self.versioned:
            raise TypeError("unexpected keyword argument")
        self.streams.append(stream)
        interface = self.array.__cuda_array_interface__
        rank = len(interface["shape"])
        shape = (ctypes.c_int64 * rank)(*interface["shape"])
        strides = (ctypes.c_int64 * rank)(*(s // 4 for s in interface["strides"]))
        managed = Versioned() if self.versioned else Managed()
        managed.tensor = DLTensor(
            interface["data"][0], DLDevice(*self.device), rank, self.code, self.bits, 1,
            shape, strides, 0,
        )  # fmt: skip
        kind = VersionedDeleter if self.versioned else Deleter
        managed.deleter = kind(self._delete)
        if self.versioned:
            managed.major, managed.flags = 1, self.flags
        self._kept.append((managed, shape, strides))
        self.exported += 1
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return new_capsule(ctypes.addressof(managed), name, None)

    def _delete(self, _):
        self.deleted += 1


def stream(number):
    """The handle of a stream that is not the default one: in the emulator any number is one."""
    if is_emulated() or "cuda:0" not in effinfer.info().devices:
        return number
    driver = ctypes.CDLL("libcuda.so.1")
    context, handle = ctypes.c_void_p(), ctypes.c_void_p()
    non_blocking = 1
    steps = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
        lambda: driver.cuCtxPushCurrent_v2(context),
        lambda: driver.cuStreamCreate(ctypes.byref(handle), non_blocking),
        lambda: driver.cuCtxPopCurrent_v2(ctypes.byref(context)),
    )
    for step in steps:
        assert step() == 0
    return handle.value


def is_emulated():
    return os.path.basename(os.environ.get("LD_PRELOAD", "")) == "libeffinfer.so"
