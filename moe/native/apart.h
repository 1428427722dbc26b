// A computation on a stack of its own: it stands aside in the middle, and goes on there.

#pragma once

#include <memory>
#include <utility>

#include <ucontext.h>

#include "../../comm/watch.h"
#include "arguments.h"

namespace {

class Apart : public interlace::Aside {
 public:
  explicit Apart(PyObject *owners) : Aside{stand_aside}, stack_(new char[STACK_BYTES]) {
    Py_INCREF(owners_ = owners);
    getcontext(&inside_);
    inside_.uc_stack.ss_sp = stack_.get();
    inside_.uc_stack.ss_size = STACK_BYTES;
    inside_.uc_link = &outside_;
    const auto self = reinterpret_cast<uintptr_t>(this);
    makecontext(&inside_, reinterpret_cast<void (*)()>(begin), 2, static_cast<unsigned>(self >> 32),
                static_cast<unsigned>(self));
  }
  virtual ~Apart() { Py_DECREF(owners_); }
  Apart(const Apart &) = delete;
  Apart &operator=(const Apart &) = delete;

  // Computes until `watch` says that what is awaited is there; if it is null, until it was asked `most`
  // times, and to its end if that is 0. Whether it has come to its end. The GIL is not needed.
  bool go_on(const interlace::Watch *watch, int64_t most) {
    begun_ = true, watch_ = watch, left_ = most;
    if (!over_) swapcontext(&outside_, &inside_);
    return over_;
  }
  bool begun() const { return begun_; }
  bool good() const { return good_; }

 private:
  static constexpr size_t STACK_BYTES = 256 * 1024;

  virtual bool run() = 0;

  static void begin(unsigned high, unsigned low) {
    auto *self = reinterpret_cast<Apart *>(static_cast<uintptr_t>(high) << 32 | low);
    self->good_ = self->run();
    self->over_ = true;
  }

  static bool stand_aside(Aside *aside) {
    auto *self = static_cast<Apart *>(aside);
    const auto *watch = self->watch_;
    if (watch == nullptr ? --self->left_ != 0 : !watch->there(watch->of)) return false;
    swapcontext(&self->inside_, &self->outside_);
    return true;
  }

  PyObject *owners_;
  std::unique_ptr<char[]> stack_;
  ucontext_t inside_, outside_;
  const interlace::Watch *watch_ = nullptr;
  int64_t left_ = 0;
  bool begun_ = false, over_ = false, good_ = false;
};

// `job(aside)` computes and returns whether it got the memory it needs.
template <class Job>
class ApartOf : public Apart {
 public:
  ApartOf(Job job, PyObject *owners) : Apart(owners), job_(std::move(job)) {}

 private:
  bool run() override { return job_(this); }
  Job job_;
};

constexpr char APART[] = "interlace.moe.apart";

Apart *apart_of(PyObject *capsule) {
  return static_cast<Apart *>(PyCapsule_GetPointer(capsule, APART));
}

// A capsule with a computation that has not begun. What it reads and writes belongs to `owners`. One
// that is given up is computed to its end: its memory is on its stack.
template <class Job>
PyObject *apart(Job job, PyObject *owners) {
  std::unique_ptr<Apart> made(new ApartOf<Job>(std::move(job), owners));
  PyObject *capsule = PyCapsule_New(made.get(), APART, [](PyObject *own) {
    Apart *given_up = apart_of(own);
    if (given_up->begun()) given_up->go_on(nullptr, 0);
    delete given_up;
  });
  if (capsule != nullptr) made.release();
  return capsule;
}

// The computation, a watch or None, and how often it may ask without one: whether it is over.
PyObject *compute_on(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
  Arguments next(args, nargs, 3);
  if (!next.good()) return nullptr;
  Apart *apart = apart_of(next.object());
  if (apart == nullptr) return nullptr;
  const interlace::Watch *watch = nullptr;
  if (PyObject *given = next.object(); given != Py_None) {
    watch = static_cast<const interlace::Watch *>(PyCapsule_GetPointer(given, interlace::WATCH));
    if (watch == nullptr) return nullptr;
  }
  const int64_t most = next.size();
  if (!next.good()) return nullptr;
  bool over;
  Py_BEGIN_ALLOW_THREADS;
  over = apart->go_on(watch, most);
  Py_END_ALLOW_THREADS;
  if (over && !apart->good()) return PyErr_NoMemory();
  return PyBool_FromLong(over);
}

}  // namespace
