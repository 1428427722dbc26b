// The window between ranks of one host: post, poll and take over memory they share, and doorbells.
//
// The same functions over the same bytes as window_reference.py, where they are explained; where
// everything lies is said in window_layout.py, and a test compares both with the constants here.
// Acquire and release on the flags order the plain copies between them. Nothing here waits but
// Doorbell.wait, and nothing allocates but the error of a message that is not as it should be.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <initializer_list>

#include <linux/futex.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "crossing.h"

namespace {

using interlace::Crossing;
using interlace::Message;
using interlace::Moments;

constexpr Py_ssize_t LINE = 64, PAGE = 4096, CANARY_BYTES = 8;
constexpr int GATHER = 1, EXCHANGE = 2;
constexpr int NOT_THERE = 1, OVERWRITTEN = 2, MISMATCH = 3, CANARY = 4;
constexpr uint64_t MAGIC_VALUE = 0x6563616C7265746EULL, CANARY_VALUE = 0x9E3779B97F4A7C15ULL;
constexpr Py_ssize_t MAX_MEMBERS = 1024;
constexpr Py_ssize_t LONG_COPY = 64 * 1024;  // from here on other threads may run meanwhile

struct Header {
  uint64_t released;
  uint64_t begun;
  uint64_t magic;
  int64_t visible_at;
  uint32_t path;
  uint32_t role;
  uint32_t stage;
  uint32_t kind;
  int64_t epoch;
  int64_t comm_seq;
  int64_t seq;
  uint64_t num_bytes;
  uint64_t num_members;
  uint64_t counts[];
};

struct Bell {
  uint32_t bell;
  uint32_t sleeping;
};

Py_ssize_t rounded(Py_ssize_t size, Py_ssize_t to) { return (size + to - 1) / to * to; }
Py_ssize_t header_bytes(Py_ssize_t members) {
  return rounded(offsetof(Header, counts) + 8 * members, LINE);
}
Py_ssize_t slot_bytes(Py_ssize_t members, Py_ssize_t capacity) {
  return rounded(header_bytes(members) + capacity + CANARY_BYTES, PAGE);
}
uint64_t canary(int64_t comm_seq) {
  return CANARY_VALUE ^ (static_cast<uint64_t>(comm_seq) * MAGIC_VALUE);
}

int64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{1000000000} * time.tv_sec + time.tv_nsec;
}

long futex(uint32_t *word, int op, uint32_t value, const timespec *timeout) {
  return syscall(SYS_futex, word, op, value, timeout, nullptr, 0);
}

void ring(Bell *bell) {
  // Sequentially consistent on both sides: either the sleeper sees the new count, or it is seen
  // asleep here.
  __atomic_add_fetch(&bell->bell, 1, __ATOMIC_SEQ_CST);
  if (__atomic_load_n(&bell->sleeping, __ATOMIC_SEQ_CST)) {
    futex(&bell->bell, FUTEX_WAKE, INT_MAX, nullptr);
  }
}

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

bool integers(PyObject *sequence, Py_ssize_t size, uint64_t *into) {
  PyObject *fast = PySequence_Fast(sequence, "counts must be a sequence");
  if (fast == nullptr) return false;
  bool good = PySequence_Fast_GET_SIZE(fast) == size;
  if (!good) {
    PyErr_Format(PyExc_ValueError, "%zd counts for %zd members", PySequence_Fast_GET_SIZE(fast),
                 size);
  }
  PyObject **items = PySequence_Fast_ITEMS(fast);
  for (Py_ssize_t nth = 0; good && nth < size; nth++) {
    into[nth] = PyLong_AsUnsignedLongLong(items[nth]);
    good = !(into[nth] == static_cast<uint64_t>(-1) && PyErr_Occurred());
  }
  Py_DECREF(fast);
  return good;
}

bool numbers(PyObject *const *args, Py_ssize_t size, int64_t *into) {
  for (Py_ssize_t nth = 0; nth < size; nth++) {
    into[nth] = PyLong_AsLongLong(args[nth]);
    if (into[nth] == -1 && PyErr_Occurred()) return false;
  }
  return true;
}

bool arity(Py_ssize_t found, Py_ssize_t least, Py_ssize_t most) {
  if (least <= found && found <= most) return true;
  PyErr_Format(PyExc_TypeError, "%zd arguments, not %zd", found, most);
  return false;
}

// An address, or a buffer that is held while this lives.
class Place {
 public:
  ~Place() {
    if (held_.obj != nullptr) PyBuffer_Release(&held_);
  }
  bool find(PyObject *place, uint64_t num_bytes, int flags) {
    if (PyLong_Check(place)) {
      address = static_cast<char *>(PyLong_AsVoidPtr(place));
      return !PyErr_Occurred();
    }
    if (PyObject_GetBuffer(place, &held_, flags) != 0) return false;
    address = static_cast<char *>(held_.buf);
    if (static_cast<uint64_t>(held_.len) >= num_bytes) return true;
    PyErr_Format(PyExc_ValueError, "a buffer of %zd bytes where %llu are needed", held_.len,
                 static_cast<unsigned long long>(num_bytes));
    return false;
  }
  char *address = nullptr;

 private:
  Py_buffer held_ = {};
};

class Buffers {
 public:
  ~Buffers() { release(); }
  bool hold(PyObject *sequence, Py_ssize_t least) {
    PyObject *fast = PySequence_Fast(sequence, "a sequence of buffers is needed");
    if (fast == nullptr) return false;
    bool good = true;
    Py_ssize_t size = PySequence_Fast_GET_SIZE(fast);
    held_ = new Py_buffer[size > 0 ? size : 1];
    for (Py_ssize_t nth = 0; good && nth < size; nth++) {
      PyObject *item = PySequence_Fast_GET_ITEM(fast, nth);
      good = PyObject_GetBuffer(item, &held_[nth], PyBUF_WRITABLE) == 0;
      if (!good) break;
      count = nth + 1;
      if (held_[nth].len < least) {
        PyErr_Format(PyExc_ValueError, "%zd bytes where %zd are needed", held_[nth].len, least);
        good = false;
      }
    }
    Py_DECREF(fast);
    return good;
  }
  void release() {
    for (Py_ssize_t nth = 0; nth < count; nth++) PyBuffer_Release(&held_[nth]);
    delete[] held_;
    held_ = nullptr;
    count = 0;
  }
  template <typename T>
  T *at(Py_ssize_t nth) const {
    return static_cast<T *>(held_[nth].buf);
  }
  Py_ssize_t count = 0;

 private:
  Py_buffer *held_ = nullptr;
};

// ---- Window

struct Window {
  PyObject_HEAD
  Buffers *memories;
  Buffers *bells;
  Py_ssize_t me, slots, capacity, head, stride;
  uint32_t path, role;
};

Header *slot_of(Window *self, Py_ssize_t member, int64_t slot) {
  return reinterpret_cast<Header *>(self->memories->at<char>(member) + slot * self->stride);
}

bool usable(Window *self, int64_t slot) {
  if (self->memories->count == 0) {
    PyErr_SetString(PyExc_ValueError, "the window is closed");
    return false;
  }
  if (0 <= slot && slot < self->slots) return true;
  PyErr_Format(PyExc_ValueError, "slot %lld of %zd", static_cast<long long>(slot), self->slots);
  return false;
}

// slot, comm_seq, epoch, seq, stage, kind
Message message_of(const int64_t *n) {
  return {n[0], n[1], n[2], n[3], static_cast<uint32_t>(n[4]), static_cast<uint32_t>(n[5])};
}

uint64_t flag_of(const Message &message) { return static_cast<uint64_t>(message.comm_seq) + 1; }

// Where the message's payload goes, which from here on is no other message's.
char *begun(Window *self, const Message &message) {
  Header *header = slot_of(self, self->me, message.slot);
  __atomic_store_n(&header->begun, flag_of(message), __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_RELEASE);
  return reinterpret_cast<char *>(header) + self->head;
}

// Its payload is there: others may read it.
void release(Window *self, const Message &message, const uint64_t *counts, uint64_t num_bytes,
             int64_t visible_at) {
  Header *header = slot_of(self, self->me, message.slot);
  const uint64_t end = canary(message.comm_seq);
  std::memcpy(reinterpret_cast<char *>(header) + self->head + num_bytes, &end, CANARY_BYTES);
  header->magic = MAGIC_VALUE;
  __atomic_store_n(&header->visible_at, visible_at, __ATOMIC_RELAXED);
  header->path = self->path;
  header->role = self->role;
  header->stage = message.stage;
  header->kind = message.kind;
  header->epoch = message.epoch;
  header->comm_seq = message.comm_seq;
  header->seq = message.seq;
  header->num_bytes = num_bytes;
  header->num_members = self->memories->count;
  std::memcpy(header->counts, counts, sizeof(uint64_t) * self->memories->count);
  __atomic_store_n(&header->released, flag_of(message), __ATOMIC_RELEASE);
  for (Py_ssize_t nth = 0; nth < self->bells->count; nth++) ring(self->bells->at<Bell>(nth));
}

// When everybody's message can be taken: 0 for now, -1 where one is missing.
int64_t visible(Window *self, const Message &message) {
  int64_t last = 0;
  for (Py_ssize_t member = 0; member < self->memories->count; member++) {
    Header *header = slot_of(self, member, message.slot);
    if (__atomic_load_n(&header->released, __ATOMIC_ACQUIRE) < flag_of(message)) return -1;
    if (member != self->me) {
      const int64_t at = __atomic_load_n(&header->visible_at, __ATOMIC_RELAXED);
      if (at > last) last = at;
    }
  }
  return last != 0 && last > now_ns() ? last : 0;
}

bool intact(Window *self, const Message &message, Py_ssize_t member) {
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  Header *found = slot_of(self, member, message.slot);
  return __atomic_load_n(&found->begun, __ATOMIC_RELAXED) == flag_of(message);
}

// A member's part for this one, of which `owed` bytes are expected: 0, or what is wrong.
int look(Window *self, const Message &message, Py_ssize_t member, uint64_t owed,
         const char **part) {
  Header *found = slot_of(self, member, message.slot);
  const uint64_t released = __atomic_load_n(&found->released, __ATOMIC_ACQUIRE);
  if (released < flag_of(message)) return NOT_THERE;
  if (released > flag_of(message) ||
      __atomic_load_n(&found->begun, __ATOMIC_RELAXED) != flag_of(message)) {
    return OVERWRITTEN;
  }
  if (found->magic != MAGIC_VALUE) return CANARY;
  const Py_ssize_t members = self->memories->count;
  if (found->path != self->path || found->role != self->role || found->stage != message.stage ||
      found->kind != message.kind || found->epoch != message.epoch ||
      found->comm_seq != message.comm_seq || found->seq != message.seq ||
      found->num_members != static_cast<uint64_t>(members)) {
    return MISMATCH;
  }
  uint64_t skipped = 0;
  for (Py_ssize_t nth = 0; message.kind != GATHER && nth < self->me; nth++) {
    skipped += found->counts[nth];
  }
  const uint64_t num_bytes = found->num_bytes;
  if (found->counts[self->me] != owed || skipped + owed > num_bytes) return MISMATCH;
  const char *data = reinterpret_cast<char *>(found) + self->head;
  uint64_t end = 0;
  if (num_bytes <= static_cast<uint64_t>(self->capacity)) {
    std::memcpy(&end, data + num_bytes, CANARY_BYTES);
  }
  if (num_bytes > static_cast<uint64_t>(self->capacity) || end != canary(message.comm_seq)) {
    return CANARY;
  }
  *part = data + skipped;
  return 0;
}

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

#define FAST(function) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function))

PyMethodDef window_methods[] = {
    {"post", FAST(window_post), METH_FASTCALL, nullptr},
    {"postpone", FAST(window_postpone), METH_FASTCALL, nullptr},
    {"poll", FAST(window_poll), METH_FASTCALL, nullptr},
    {"take", FAST(window_take), METH_FASTCALL, nullptr},
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

PyMethodDef doorbell_methods[] = {
    {"heard", FAST(doorbell_heard), METH_NOARGS, nullptr},
    {"wait", FAST(doorbell_wait), METH_FASTCALL, nullptr},
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

// ---- Crossing: a stretch of a window's collectives, see crossing.h

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
  moments[0].resumed = now_ns();
  self->crossing = {&FUNCTIONS, own,     own->memories->count, own->me, num, copied, moments,
                    spin_ns,    0,       0,                    0,       0};
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
