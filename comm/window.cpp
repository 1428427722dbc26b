// The window between ranks of one host: post, poll and take over memory they share, and doorbells.
//
// The same functions over the same bytes as window_reference.py, where they are explained; where
// everything lies is said in window_layout.py. Nothing here waits but Doorbell.wait, and a crossing for
// as long as it is told to look; nothing allocates but a crossing, a watch, and the error of a message
// that is not as it should be.

#include "window_crossing.h"
#include "window_memory.h"
#include "window_watch.h"

namespace {

// ---- Window

PyObject *window_new(PyTypeObject *type, PyObject *args, PyObject *) {
  PyObject *memories, *bells = nullptr;
  Py_ssize_t me, slots, capacity;
  unsigned int path, role;
  if (!PyArg_ParseTuple(args, "OnnnII|O", &memories, &me, &slots, &capacity, &path, &role,
                        &bells)) {
    return nullptr;
  }
  Py_ssize_t members = PySequence_Size(memories);
  if (members < 0) return nullptr;
  if (members < 1 || members > MAX_MEMBERS || me < 0 || me >= members || slots < 1 ||
      capacity < 0) {
    return PyErr_Format(PyExc_ValueError, "member %zd of %zd with %zd slots of %zd bytes", me,
                        members, slots, capacity);
  }
  auto *self = reinterpret_cast<Window *>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->memories = new Buffers;
  self->bells = new Buffers;
  self->me = me;
  self->slots = slots;
  self->capacity = capacity;
  self->head = header_bytes(members);
  self->stride = slot_bytes(members, capacity);
  self->path = path;
  self->role = role;
  if (!self->memories->hold(memories, slots * self->stride) ||
      (bells != nullptr && !self->bells->hold(bells, sizeof(Bell)))) {
    Py_DECREF(self);
    return nullptr;
  }
  return reinterpret_cast<PyObject *>(self);
}

void window_dealloc(Window *self) {
  PyTypeObject *type = Py_TYPE(self);
  delete self->memories;
  delete self->bells;
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject *window_close(Window *self, PyObject *) {
  self->memories->release();
  self->bells->release();
  Py_RETURN_NONE;
}

PyObject *window_post(Window *self, PyObject *const *args, Py_ssize_t nargs) {
  // slot, comm_seq, epoch, seq, stage, kind, payload, counts, visible_at
  int64_t n[6], visible_at = 0;
  uint64_t counts[MAX_MEMBERS];
  const Py_ssize_t members = self->memories->count;
  if (!arity(nargs, 8, 9) || !numbers(args, 6, n) || !usable(self, n[0]) ||
      !integers(args[7], members, counts) || (nargs == 9 && !numbers(args + 8, 1, &visible_at))) {
    return nullptr;
  }
  uint64_t num_bytes = counts[0];
  for (Py_ssize_t nth = 1; n[5] != GATHER && nth < members; nth++) num_bytes += counts[nth];
  if (num_bytes > static_cast<uint64_t>(self->capacity)) {
    return PyErr_Format(PyExc_ValueError, "%llu bytes do not fit into a slot of %zd",
                        static_cast<unsigned long long>(num_bytes), self->capacity);
  }
  Place payload;
  if (!payload.find(args[6], num_bytes, PyBUF_SIMPLE)) return nullptr;

  const Message message = message_of(n);
  char *data = begun(self, message);
  if (num_bytes > LONG_COPY) {
    Py_BEGIN_ALLOW_THREADS;
    std::memcpy(data, payload.address, num_bytes);
    Py_END_ALLOW_THREADS;
  } else if (num_bytes > 0) {
    std::memcpy(data, payload.address, num_bytes);
  }
  release(self, message, counts, num_bytes, visible_at);
  Py_RETURN_NONE;
}

PyObject *window_postpone(Window *self, PyObject *const *args, Py_ssize_t nargs) {
  int64_t n[3];  // slot, comm_seq, visible_at
  if (!arity(nargs, 3, 3) || !numbers(args, 3, n) || !usable(self, n[0])) return nullptr;
  Header *header = slot_of(self, self->me, n[0]);
  if (header->released == static_cast<uint64_t>(n[1]) + 1) {
    __atomic_store_n(&header->visible_at, n[2], __ATOMIC_RELAXED);
  }
  Py_RETURN_NONE;
}

PyObject *window_poll(Window *self, PyObject *const *args, Py_ssize_t nargs) {
  int64_t n[6] = {};  // slot, comm_seq
  if (!arity(nargs, 2, 2) || !numbers(args, 2, n) || !usable(self, n[0])) return nullptr;
  return PyLong_FromLongLong(visible(self, message_of(n)));
}

PyObject *window_take(Window *self, PyObject *const *args, Py_ssize_t nargs) {
  // slot, comm_seq, epoch, seq, stage, kind, counts, out
  int64_t n[6];
  uint64_t owed[MAX_MEMBERS], total = 0;
  const Py_ssize_t members = self->memories->count;
  if (!arity(nargs, 8, 8) || !numbers(args, 6, n) || !usable(self, n[0]) ||
      !integers(args[6], members, owed)) {
    return nullptr;
  }
  for (Py_ssize_t member = 0; member < members; member++) total += owed[member];
  Place out;
  if (!out.find(args[7], total, PyBUF_WRITABLE)) return nullptr;

  const Message message = message_of(n);
  int code = 0;
  Py_ssize_t member = 0;
  PyThreadState *saved = total > LONG_COPY ? PyEval_SaveThread() : nullptr;
  char *into = out.address;
  for (; member < members; member++) {
    const char *part = nullptr;
    code = look(self, message, member, owed[member], &part);
    if (code != 0) break;
    if (owed[member] > 0) std::memcpy(into, part, owed[member]);
    into += owed[member];
    if (!intact(self, message, member)) {
      code = OVERWRITTEN;
      break;
    }
  }
  if (saved != nullptr) PyEval_RestoreThread(saved);
  if (code == 0) Py_RETURN_NONE;
  const char *raw = reinterpret_cast<char *>(slot_of(self, member, n[0]));
  return Py_BuildValue("iny#", code, member, raw, self->head);
}

PyMethodDef window_methods[] = {
    {"post", FAST(window_post), METH_FASTCALL, nullptr},
    {"postpone", FAST(window_postpone), METH_FASTCALL, nullptr},
    {"poll", FAST(window_poll), METH_FASTCALL, nullptr},
    {"take", FAST(window_take), METH_FASTCALL, nullptr},
    {"watch", FAST(window_watch), METH_FASTCALL, nullptr},
    {"close", FAST(window_close), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot window_slots[] = {
    {Py_tp_new, reinterpret_cast<void *>(window_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(window_dealloc)},
    {Py_tp_methods, window_methods},
    {0, nullptr},
};

PyType_Spec window_spec = {"interlace.comm._window.Window", sizeof(Window), 0, Py_TPFLAGS_DEFAULT,
                           window_slots};

// ---- Doorbell: one rank's own

struct Doorbell {
  PyObject_HEAD
  Buffers *memory;
};

PyObject *doorbell_new(PyTypeObject *type, PyObject *args, PyObject *) {
  PyObject *memory;
  if (!PyArg_ParseTuple(args, "O", &memory)) return nullptr;
  auto *self = reinterpret_cast<Doorbell *>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->memory = new Buffers;
  PyObject *one = PyTuple_Pack(1, memory);
  const bool held = one != nullptr && self->memory->hold(one, sizeof(Bell));
  Py_XDECREF(one);
  if (!held) {
    Py_DECREF(self);
    return nullptr;
  }
  return reinterpret_cast<PyObject *>(self);
}

void doorbell_dealloc(Doorbell *self) {
  PyTypeObject *type = Py_TYPE(self);
  delete self->memory;
  type->tp_free(self);
  Py_DECREF(type);
}

Bell *bell_of(Doorbell *self) {
  if (self->memory->count != 0) return self->memory->at<Bell>(0);
  PyErr_SetString(PyExc_ValueError, "the doorbell is closed");
  return nullptr;
}

PyObject *doorbell_close(Doorbell *self, PyObject *) {
  self->memory->release();
  Py_RETURN_NONE;
}

PyObject *doorbell_heard(Doorbell *self, PyObject *) {
  Bell *bell = bell_of(self);
  if (bell == nullptr) return nullptr;
  return PyLong_FromUnsignedLong(__atomic_load_n(&bell->bell, __ATOMIC_ACQUIRE));
}

PyObject *doorbell_wait(Doorbell *self, PyObject *const *args, Py_ssize_t nargs) {
  int64_t n[3];  // heard, until_ns, spin_ns
  if (!arity(nargs, 3, 3) || !numbers(args, 3, n)) return nullptr;
  Bell *bell = bell_of(self);
  if (bell == nullptr) return nullptr;
  const auto heard = static_cast<uint32_t>(n[0]);
  Py_BEGIN_ALLOW_THREADS;
  int64_t now = now_ns();
  const int64_t spin_until = n[1] < now + n[2] ? n[1] : now + n[2];
  while (now < spin_until && __atomic_load_n(&bell->bell, __ATOMIC_ACQUIRE) == heard) {
    for (int nth = 0; nth < 16; nth++) pause_briefly();
    if (__atomic_load_n(&bell->bell, __ATOMIC_ACQUIRE) != heard) break;
    sched_yield();
    now = now_ns();
  }
  if (now < n[1] && __atomic_load_n(&bell->bell, __ATOMIC_ACQUIRE) == heard) {
    const int64_t left = n[1] - now;
    const timespec timeout = {static_cast<time_t>(left / 1000000000),
                              static_cast<long>(left % 1000000000)};
    __atomic_store_n(&bell->sleeping, 1, __ATOMIC_SEQ_CST);
    futex(&bell->bell, FUTEX_WAIT, heard, &timeout);
    __atomic_store_n(&bell->sleeping, 0, __ATOMIC_SEQ_CST);
  }
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

// From any thread. Once it is closed nobody waits.
PyObject *doorbell_ring(Doorbell *self, PyObject *) {
  if (self->memory->count != 0) ring(self->memory->at<Bell>(0));
  Py_RETURN_NONE;
}

PyMethodDef doorbell_methods[] = {
    {"heard", FAST(doorbell_heard), METH_NOARGS, nullptr},
    {"wait", FAST(doorbell_wait), METH_FASTCALL, nullptr},
    {"ring", FAST(doorbell_ring), METH_NOARGS, nullptr},
    {"close", FAST(doorbell_close), METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot doorbell_slots[] = {
    {Py_tp_new, reinterpret_cast<void *>(doorbell_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(doorbell_dealloc)},
    {Py_tp_methods, doorbell_methods},
    {0, nullptr},
};

PyType_Spec doorbell_spec = {"interlace.comm._window.Doorbell", sizeof(Doorbell), 0,
                             Py_TPFLAGS_DEFAULT, doorbell_slots};

// ---- the module

PyObject *wake_on_time(PyObject *, PyObject *) {
  // This thread's sleeps end when they were told to, not up to 50 microseconds later.
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
  Py_RETURN_NONE;
}

PyObject *layout(PyObject *, PyObject *) {
  return Py_BuildValue(
      "{s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:K,s:K,s:n,"
      "s:i,s:i,s:i,s:i,s:i,s:i,s:n,s:n}",
      "LINE", LINE, "PAGE", PAGE, "RELEASED", offsetof(Header, released), "BEGUN",
      offsetof(Header, begun), "MAGIC", offsetof(Header, magic), "VISIBLE_AT",
      offsetof(Header, visible_at), "PATH", offsetof(Header, path), "ROLE", offsetof(Header, role),
      "STAGE", offsetof(Header, stage), "KIND", offsetof(Header, kind), "EPOCH",
      offsetof(Header, epoch), "COMM_SEQ", offsetof(Header, comm_seq), "SEQ",
      offsetof(Header, seq), "NUM_BYTES", offsetof(Header, num_bytes), "NUM_MEMBERS",
      offsetof(Header, num_members), "COUNTS", offsetof(Header, counts), "MAGIC_VALUE",
      MAGIC_VALUE, "CANARY_VALUE", CANARY_VALUE, "CANARY_BYTES", CANARY_BYTES, "GATHER", GATHER,
      "EXCHANGE", EXCHANGE, "NOT_THERE", NOT_THERE, "OVERWRITTEN", OVERWRITTEN, "MISMATCH",
      MISMATCH, "CANARY", CANARY, "BELL", offsetof(Bell, bell), "SLEEPING",
      offsetof(Bell, sleeping));
}

PyObject *sizes(PyObject *, PyObject *args) {
  Py_ssize_t members, capacity;
  if (!PyArg_ParseTuple(args, "nn", &members, &capacity)) return nullptr;
  return Py_BuildValue("nn", header_bytes(members), slot_bytes(members, capacity));
}

PyMethodDef module_methods[] = {
    {"wake_on_time", wake_on_time, METH_NOARGS, nullptr},
    {"layout", layout, METH_NOARGS, nullptr},
    {"sizes", sizes, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

int add_types(PyObject *module) {
  for (PyType_Spec *spec : {&window_spec, &doorbell_spec, &crossing_spec}) {
    PyObject *type = PyType_FromSpec(spec);
    if (type == nullptr) return -1;
    const int added = PyModule_AddType(module, reinterpret_cast<PyTypeObject *>(type));
    Py_DECREF(type);
    if (added != 0) return -1;
  }
  return 0;
}

PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, reinterpret_cast<void *>(add_types)},
    {0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "interlace.comm._window", nullptr, 0, module_methods, module_slots,
    nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__window() { return PyModuleDef_Init(&module); }
