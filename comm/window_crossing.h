// The Python type of a crossing over a window: a stretch of its collectives, see crossing.h.

#pragma once

#include "window_memory.h"

namespace {

struct CrossingObject {
  PyObject_HEAD
  Window *window;
  Crossing crossing;
};

char *crossing_begin(void *window, const Message &message, uint64_t num_bytes) {
  auto *self = static_cast<Window *>(window);
  return num_bytes > static_cast<uint64_t>(self->capacity) ? nullptr : begun(self, message);
}

void crossing_release(void *window, const Message &message, const uint64_t *counts,
                      uint64_t num_bytes) {
  release(static_cast<Window *>(window), message, counts, num_bytes, 0);
}

bool crossing_arrived(void *window, const Message &message, int64_t spin_ns) {
  auto *self = static_cast<Window *>(window);
  if (visible(self, message) == 0) return true;
  const int64_t until = now_ns() + spin_ns;
  while (now_ns() < until) {
    for (int nth = 0; nth < 16; nth++) pause_briefly();
    if (visible(self, message) == 0) return true;
    sched_yield();
  }
  return visible(self, message) == 0;
}

int crossing_look(void *window, const Message &message, int64_t member, uint64_t owed,
                  const char **part) {
  return look(static_cast<Window *>(window), message, member, owed, part);
}

bool crossing_intact(void *window, const Message &message, int64_t member) {
  return intact(static_cast<Window *>(window), message, member);
}

constexpr interlace::WindowFunctions FUNCTIONS = {
    crossing_begin, crossing_release, crossing_arrived, crossing_look, crossing_intact, now_ns,
};

PyObject *crossing_new(PyTypeObject *type, PyObject *args, PyObject *) {
  PyObject *window;
  Py_buffer messages;
  long long spin_ns;
  if (!PyArg_ParseTuple(args, "Oy*L", &window, &messages, &spin_ns)) return nullptr;
  if (Py_TYPE(window)->tp_dealloc != reinterpret_cast<destructor>(window_dealloc)) {
    PyBuffer_Release(&messages);
    PyErr_SetString(PyExc_TypeError, "a crossing is over a Window");
    return nullptr;
  }
  const auto num = messages.len / static_cast<Py_ssize_t>(sizeof(Message));
  auto *copied = static_cast<Message *>(PyMem_Malloc(messages.len + 1));
  auto *moments = static_cast<Moments *>(PyMem_Calloc(num + 1, sizeof(Moments)));
  bool good = copied != nullptr && moments != nullptr;
  if (good) {
    std::memcpy(copied, messages.buf, messages.len);
  } else {
    PyErr_NoMemory();
  }
  PyBuffer_Release(&messages);
  auto *own = reinterpret_cast<Window *>(window);
  for (Py_ssize_t nth = 0; good && nth < num; nth++) good = usable(own, copied[nth].slot);
  auto *self = good ? reinterpret_cast<CrossingObject *>(type->tp_alloc(type, 0)) : nullptr;
  if (self == nullptr) {
    PyMem_Free(copied);
    PyMem_Free(moments);
    return nullptr;
  }
  Py_INCREF(window);
  self->window = own;
  self->crossing = {};
  Crossing &crossing = self->crossing;
  crossing.functions = &FUNCTIONS, crossing.window = own;
  crossing.members = own->memories->count, crossing.me = own->me;
  crossing.num = num, crossing.messages = copied, crossing.moments = moments;
  crossing.spin_ns = spin_ns, crossing.resumed = now_ns();
  return reinterpret_cast<PyObject *>(self);
}

void crossing_dealloc(CrossingObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  PyMem_Free(const_cast<Message *>(self->crossing.messages));
  PyMem_Free(self->crossing.moments);
  Py_XDECREF(self->window);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject *crossing_address(CrossingObject *self, PyObject *) {
  return PyLong_FromVoidPtr(&self->crossing);
}

PyObject *crossing_at(CrossingObject *self, PyObject *) {
  return PyLong_FromLongLong(self->crossing.at);
}

PyObject *crossing_poll(CrossingObject *self, PyObject *) {
  const Crossing &c = self->crossing;
  if (!usable(self->window, 0)) return nullptr;
  return PyBool_FromLong(c.at >= c.num || visible(self->window, c.messages[c.at]) == 0);
}

PyObject *crossing_moments(CrossingObject *self, PyObject *) {
  const Crossing &c = self->crossing;
  PyObject *all = PyList_New(c.at);
  for (Py_ssize_t nth = 0; all != nullptr && nth < c.at; nth++) {
    const Moments &of = c.moments[nth];
    PyObject *one = Py_BuildValue("ddddd", of.resumed * 1e-9, of.computed * 1e-9, of.posted * 1e-9,
                                  of.settled * 1e-9, of.waited * 1e-9);
    if (one == nullptr) {
      Py_CLEAR(all);
    } else {
      PyList_SET_ITEM(all, nth, one);
    }
  }
  return all;
}

PyObject *crossing_fault(CrossingObject *self, PyObject *) {
  const Crossing &c = self->crossing;
  if (c.fault == 0) Py_RETURN_NONE;
  if (!usable(self->window, 0)) return nullptr;
  const char *raw = reinterpret_cast<char *>(slot_of(self->window, c.member, c.messages[c.at].slot));
  return Py_BuildValue("inKy#", c.fault, static_cast<Py_ssize_t>(c.member),
                       static_cast<unsigned long long>(c.num_bytes), raw, self->window->head);
}

PyMethodDef crossing_methods[] = {
    {"address", FAST(crossing_address), METH_NOARGS, nullptr},
    {"at", FAST(crossing_at), METH_NOARGS, nullptr},
    {"poll", FAST(crossing_poll), METH_NOARGS, nullptr},
    {"moments", FAST(crossing_moments), METH_NOARGS, nullptr},
    {"fault", FAST(crossing_fault), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot crossing_slots[] = {
    {Py_tp_new, reinterpret_cast<void *>(crossing_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(crossing_dealloc)},
    {Py_tp_methods, crossing_methods},
    {0, nullptr},
};

PyType_Spec crossing_spec = {"interlace.comm._window.Crossing", sizeof(CrossingObject), 0,
                             Py_TPFLAGS_DEFAULT, crossing_slots};

}  // namespace
