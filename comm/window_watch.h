// A watch over a window: whether a message of it has come from everybody.

#pragma once

#include "watch.h"
#include "window_memory.h"

namespace {

struct WindowWatch {
  interlace::Watch watch;
  Window *window;
  Message message;
};

bool has_come(const void *of) {
  auto *self = static_cast<const WindowWatch *>(of);
  return visible(self->window, self->message) == 0;
}

PyObject *window_watch(Window *self, PyObject *const *args, Py_ssize_t nargs) {
  int64_t n[6] = {};  // slot, comm_seq
  if (!arity(nargs, 2, 2) || !numbers(args, 2, n) || !usable(self, n[0])) return nullptr;
  auto *made = static_cast<WindowWatch *>(PyMem_Malloc(sizeof(WindowWatch)));
  if (made == nullptr) return PyErr_NoMemory();
  *made = {{has_come, made}, self, message_of(n)};
  PyObject *capsule = PyCapsule_New(made, interlace::WATCH, [](PyObject *own) {
    auto *watch = static_cast<WindowWatch *>(PyCapsule_GetPointer(own, interlace::WATCH));
    Py_DECREF(watch->window);
    PyMem_Free(watch);
  });
  if (capsule == nullptr) {
    PyMem_Free(made);
  } else {
    Py_INCREF(self);
  }
  return capsule;
}

}  // namespace
