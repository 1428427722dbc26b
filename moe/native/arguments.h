// How a method of the module finds its arguments and its kernels.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>

#include "kernels.h"

namespace {

using interlace::bf16;

// The arguments of one call, taken in order: addresses and sizes, or floats.
class Arguments {
 public:
  Arguments(PyObject *const *args, Py_ssize_t found, Py_ssize_t wanted) : args_(args) {
    if (found == wanted) return;
    PyErr_Format(PyExc_TypeError, "%zd arguments given, %zd wanted", found, wanted);
    good_ = false;
  }
  bool good() const { return good_; }
  int64_t size() { return good_ ? checked<int64_t>(PyLong_AsLongLong(*args_++), -1) : 0; }
  float real() {
    return good_ ? static_cast<float>(checked<double>(PyFloat_AsDouble(*args_++), -1.0)) : 0.0f;
  }
  template <class T>
  T *at() {
    return reinterpret_cast<T *>(static_cast<intptr_t>(size()));
  }
  PyObject *object() { return *args_++; }

 private:
  template <class T>
  T checked(T value, T error) {
    if (value == error && PyErr_Occurred()) good_ = false;
    return value;
  }
  PyObject *const *args_;
  bool good_ = true;
};

// The same of numbers that lie side by side, eight bytes each: read in every step, objects of Python
// would have to be fetched one by one.
class Numbers {
 public:
  explicit Numbers(const char *at) : at_(at) {}
  int64_t size() { return taken<int64_t>(); }
  float real() { return static_cast<float>(taken<double>()); }
  template <class T>
  T *at() {
    return reinterpret_cast<T *>(static_cast<intptr_t>(size()));
  }

 private:
  template <class N>
  N taken() {
    static_assert(sizeof(N) == 8, "eight bytes each");
    N number;
    std::memcpy(&number, at_, sizeof number);
    at_ += sizeof number;
    return number;
  }
  const char *at_;
};

const interlace::Kernels *kernels_of(PyObject *module) {
  auto *kernels = *static_cast<const interlace::Kernels **>(PyModule_GetState(module));
  if (kernels == nullptr) PyErr_SetString(PyExc_RuntimeError, "this processor runs no kernels");
  return kernels;
}

PyObject *done(bool good) {
  if (!good) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

// Runs a kernel while other threads may run Python.
template <class Job>
PyObject *run(bool (*kernel)(const Job &), const Job &job) {
  bool good;
  Py_BEGIN_ALLOW_THREADS;
  good = kernel(job);
  Py_END_ALLOW_THREADS;
  return done(good);
}

// A method's arguments are the size of an element in bytes, which chooses the kernels, and `wanted`
// more.
template <class T>
using Method = PyObject *(*)(const interlace::KernelsOf<T> &, Arguments);
template <Method<bf16> of_bf16, Method<float> of_float32, Py_ssize_t wanted>
PyObject *by_size(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
  const interlace::Kernels *kernels = kernels_of(module);
  if (kernels == nullptr) return nullptr;
  Arguments next(args, nargs, 1 + wanted);
  const int64_t size = next.size();
  if (!next.good()) return nullptr;
  if (size == sizeof(bf16)) return of_bf16(kernels->of_bf16, next);
  if (size == sizeof(float)) return of_float32(kernels->of_float32, next);
  PyErr_Format(PyExc_ValueError, "an element of %lld bytes; there are kernels for 2 and 4",
               static_cast<long long>(size));
  return nullptr;
}

#define METHOD(name) \
  template <class T> \
  PyObject *name(const interlace::KernelsOf<T> &kernels, Arguments next)

}  // namespace
