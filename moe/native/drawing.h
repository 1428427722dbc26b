// Drawing of tokens for Python, which has a row's numbers in sequences.

#pragma once

#include <vector>

#include "arguments.h"
#include "sampling.h"

namespace {

// Seed and trajectory may be any integers: 64 bits of them count.
bool noise_of(PyObject *row, uint64_t *to) {
  for (Py_ssize_t nth = 0; nth < 3; nth++) {
    PyObject *number = PySequence_GetItem(row, nth);
    if (number == nullptr) return false;
    to[nth] = PyLong_AsUnsignedLongLongMask(number);
    Py_DECREF(number);
    if (PyErr_Occurred()) return false;
  }
  return true;
}

// Rows of `size` logits, their temperatures and noises: for each row token and log-probabilities, or
// None (see sampling.h).
PyObject *draw(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
  Arguments next(args, nargs, 4);
  const auto *logits = next.at<const float>();
  const int64_t size = next.size();
  if (!next.good()) return nullptr;
  PyObject *temperatures = next.object(), *noises = next.object();
  const Py_ssize_t rows = PySequence_Size(temperatures);
  if (rows < 0 || PySequence_Size(noises) < rows) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a row has no noise");
    return nullptr;
  }
  std::vector<double> temperature(rows), out(3 * rows), weights(size);
  std::vector<uint64_t> noise(3 * rows);
  for (Py_ssize_t nth = 0; nth < rows; nth++) {
    PyObject *own = PySequence_GetItem(temperatures, nth);
    temperature[nth] = own == nullptr ? 0.0 : PyFloat_AsDouble(own);
    Py_XDECREF(own);
    PyObject *of_row = PyErr_Occurred() ? nullptr : PySequence_GetItem(noises, nth);
    const bool good = of_row != nullptr && noise_of(of_row, noise.data() + 3 * nth);
    Py_XDECREF(of_row);
    if (!good) return nullptr;
  }
  interlace::draw(out.data(), logits, temperature.data(), noise.data(), rows, size, weights.data());
  PyObject *drawn = PyList_New(rows);
  for (Py_ssize_t nth = 0; drawn != nullptr && nth < rows; nth++) {
    const double *of = out.data() + 3 * nth;
    PyObject *one = of[0] < 0 ? Py_NewRef(Py_None)
                              : Py_BuildValue("Ldd", static_cast<long long>(of[0]), of[1], of[2]);
    if (one == nullptr) {
      Py_CLEAR(drawn);
    } else {
      PyList_SET_ITEM(drawn, nth, one);
    }
  }
  return drawn;
}

}  // namespace
