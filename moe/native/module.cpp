// interlace.moe._kernels: the best kernels this processor runs, over addresses of tensors.
//
// Nothing is checked here but the number of arguments: shapes and types are kernels.py's business.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdlib>
#include <cstring>

#include "kernels.h"
#include "sampling.h"

namespace {

using interlace::bf16;

constexpr int MOST_KERNELS = 4;

// Fills `found` with the kernels that this processor runs, the best first; returns how many.
int runnable(const interlace::Kernels *(&found)[MOST_KERNELS]) {
  int count = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bf16");
  if (avx2 && avx512) {
    if (interlace::ask_for_tiles()) found[count++] = interlace::amx_kernels();
    // Intel's take two cycles for a product of pairs, in which two float32 products are done twice.
    const bool pairs_are_slow = __builtin_cpu_is("intel");
    const auto *wide = interlace::avx512_wide_kernels(), *pairs = interlace::avx512_kernels();
    found[count++] = pairs_are_slow ? wide : pairs;
    found[count++] = pairs_are_slow ? pairs : wide;
  }
  if (avx2) found[count++] = interlace::avx2_kernels();
#endif
  return count;
}

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

METHOD(pack) {
  T *to = next.at<T>();
  const T *from = next.at<const T>();
  int64_t sizes[4];
  for (int64_t &size : sizes) size = next.size();
  if (!next.good()) return nullptr;
  kernels.pack(to, from, sizes[0], sizes[1], sizes[2], sizes[3]);
  Py_RETURN_NONE;
}

METHOD(multiply) {
  interlace::Product<T> p;
  p.out = next.at<T>();
  p.out_stride = next.size();
  p.x = next.at<const T>();
  p.x_stride = next.size();
  p.rows = next.size();
  p.packed = next.at<const T>();
  p.outputs = next.size();
  p.inputs = next.size();
  return next.good() ? run(kernels.multiply, p) : nullptr;
}

// The items of a sequence of integers; null with an error set. To be freed with PyMem_Free.
int64_t *integers(PyObject *sequence, Py_ssize_t *size) {
  PyObject *fast = PySequence_Fast(sequence, "counts and matrices must be sequences");
  if (fast == nullptr) return nullptr;
  *size = PySequence_Fast_GET_SIZE(fast);
  auto *items = static_cast<int64_t *>(PyMem_Malloc((*size + 1) * sizeof(int64_t)));
  if (items == nullptr) PyErr_NoMemory();
  for (Py_ssize_t nth = 0; items != nullptr && nth < *size; nth++) {
    items[nth] = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast, nth));
    if (items[nth] == -1 && PyErr_Occurred()) {
      PyMem_Free(items);
      items = nullptr;
    }
  }
  Py_DECREF(fast);
  return items;
}

METHOD(experts) {
  interlace::ExpertPass<T> p;
  p.out = next.at<T>();
  p.x = next.at<const T>();
  p.x_stride = next.size();
  p.hidden = next.size();
  p.width = next.size();
  if (!next.good()) return nullptr;
  Py_ssize_t num_counts = 0, num_matrices = 0;
  int64_t *counts = integers(next.object(), &num_counts);
  int64_t *matrices = counts == nullptr ? nullptr : integers(next.object(), &num_matrices);
  PyObject *result = nullptr;
  if (matrices != nullptr && num_matrices != 2 * num_counts) {
    PyErr_Format(PyExc_ValueError, "%zd counts for %zd matrices: each expert has two", num_counts,
                 num_matrices);
  } else if (matrices != nullptr) {
    p.experts = num_counts;
    p.counts = counts;
    static_assert(sizeof(T *) == sizeof(int64_t), "addresses are 64 bits wide");
    p.matrices = reinterpret_cast<const T *const *>(matrices);
    result = run(kernels.experts, p);
  }
  PyMem_Free(matrices);
  PyMem_Free(counts);
  return result;
}

METHOD(norm) {
  interlace::Norm<T> n;
  n.out = next.at<T>();
  n.sum = next.at<T>();
  n.x = next.at<const T>();
  n.x_stride = next.size();
  n.y = next.at<const T>();
  n.weight = next.at<const T>();
  n.rows = next.size();
  n.width = next.size();
  n.eps = next.real();
  n.factor = next.real();
  if (!next.good()) return nullptr;
  kernels.norm(n);
  Py_RETURN_NONE;
}

METHOD(choose) {
  interlace::Choice<T> c;
  c.ids = next.at<int64_t>();
  c.weights = next.at<float>();
  c.logits = next.at<const T>();
  c.logits_stride = next.size();
  c.rows = next.size();
  c.experts = next.size();
  c.top_k = next.size();
  c.normalise = next.size() != 0;
  c.scale = next.real();
  return next.good() ? done(kernels.choose(c)) : nullptr;
}

METHOD(mix) {
  interlace::Mix<T> m;
  m.out = next.at<T>();
  m.outputs = next.at<const T>();
  m.weights = next.at<const float>();
  m.rows = next.size();
  m.top_k = next.size();
  m.width = next.size();
  if (!next.good()) return nullptr;
  kernels.mix(m);
  Py_RETURN_NONE;
}

METHOD(turn_heads) {
  interlace::Heads<T> h;
  h.queries = next.at<T>();
  h.qkv = next.at<const T>();
  h.qkv_stride = next.size();
  h.norm = next.at<const T>();
  h.cos = next.at<const float>();
  h.sin = next.at<const float>();
  h.slots = next.at<const int64_t>();
  h.pages = next.at<T>();
  h.rows = next.size();
  h.heads = next.size();
  h.kv_heads = next.size();
  h.width = next.size();
  h.eps = next.real();
  return next.good() ? done(kernels.turn_heads(h)) : nullptr;
}

METHOD(attend) {
  interlace::Attention<T> a;
  a.out = next.at<T>();
  a.queries = next.at<const T>();
  a.pages = next.at<const T>();
  a.tables = next.at<const int64_t>();
  a.tables_stride = next.size();
  a.starts = next.at<const int64_t>();
  a.positions = next.at<const int64_t>();
  a.sequences = next.size();
  a.heads = next.size();
  a.kv_heads = next.size();
  a.width = next.size();
  a.scale = next.real();
  return next.good() ? run(kernels.attend, a) : nullptr;
}

// From a residual to its rows' experts: everything of a layer that no collective interrupts when
// heads are not split. What each part does is its own kernel's business; this is their order.
METHOD(attention_block) {
  interlace::Norm<T> before = {}, after = {};
  interlace::Product<T> qkv = {}, o = {}, router = {};
  interlace::Heads<T> heads = {};
  interlace::Attention<T> attention = {};
  interlace::Choice<T> choice = {};
  after.sum = next.at<T>();
  after.out = next.at<T>();
  choice.ids = next.at<int64_t>();
  choice.weights = next.at<float>();
  after.x = before.x = next.at<const T>();
  const int64_t rows = next.size();
  heads.cos = next.at<const float>();
  heads.sin = next.at<const float>();
  heads.slots = next.at<const int64_t>();
  attention.pages = heads.pages = next.at<T>();
  attention.tables = next.at<const int64_t>();
  attention.tables_stride = next.size();
  attention.starts = next.at<const int64_t>();
  attention.positions = next.at<const int64_t>();
  attention.sequences = next.size();
  const int64_t hidden = next.size();
  before.weight = next.at<const T>();
  qkv.packed = next.at<const T>();
  heads.norm = next.at<const T>();
  attention.heads = heads.heads = next.size();
  attention.kv_heads = heads.kv_heads = next.size();
  attention.width = heads.width = next.size();
  attention.scale = next.real();
  o.packed = next.at<const T>();
  after.weight = next.at<const T>();
  router.packed = next.at<const T>();
  choice.experts = next.size();
  choice.top_k = next.size();
  choice.normalise = next.size() != 0;
  choice.scale = next.real();
  after.factor = next.real();
  after.eps = before.eps = heads.eps = next.real();
  if (!next.good()) return nullptr;
  const int64_t width = heads.heads * heads.width;
  qkv.outputs = width + 2 * heads.kv_heads * heads.width;
  const int64_t row_size = hidden + qkv.outputs + 2 * width + hidden + choice.experts;
  const size_t size = static_cast<size_t>(rows * row_size) * sizeof(T);
  auto *scratch = static_cast<T *>(std::aligned_alloc(64, (size + 64) / 64 * 64));
  if (scratch == nullptr) return PyErr_NoMemory();
  before.out = scratch;
  qkv.out = before.out + rows * hidden;
  heads.queries = qkv.out + rows * qkv.outputs;
  attention.out = heads.queries + rows * width;
  o.out = attention.out + rows * width;
  router.out = o.out + rows * hidden;
  before.rows = after.rows = qkv.rows = o.rows = router.rows = rows;
  heads.rows = choice.rows = rows;
  before.x_stride = after.x_stride = before.width = after.width = hidden;
  qkv.x = before.out, qkv.x_stride = qkv.inputs = hidden, qkv.out_stride = qkv.outputs;
  heads.qkv = qkv.out, heads.qkv_stride = qkv.outputs;
  attention.queries = heads.queries;
  o.x = attention.out, o.x_stride = o.inputs = width, o.out_stride = o.outputs = hidden;
  after.y = o.out;
  router.x = after.out, router.x_stride = router.inputs = hidden;
  router.out_stride = router.outputs = choice.experts;
  choice.logits = router.out, choice.logits_stride = choice.experts;
  bool good = true;
  Py_BEGIN_ALLOW_THREADS;
  kernels.norm(before);
  good = kernels.multiply(qkv) && kernels.turn_heads(heads) && kernels.attend(attention) &&
         kernels.multiply(o);
  if (good) {
    kernels.norm(after);
    good = kernels.multiply(router) && kernels.choose(choice);
  }
  Py_END_ALLOW_THREADS;
  std::free(scratch);
  return done(good);
}

// Rows dealt out by expert: for each expert in its order the rows that go to it, by row and slot.
PyObject *deal(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
  Arguments next(args, nargs, 10);
  char *to = next.at<char>();
  int64_t *order = next.at<int64_t>(), *counts = next.at<int64_t>();
  const char *rows = next.at<const char>();
  const int64_t row_bytes = next.size(), stride_bytes = next.size();
  const int64_t *ids = next.at<const int64_t>();
  const int64_t num_ids = next.size(), top_k = next.size();
  const int64_t experts = next.size();
  if (!next.good()) return nullptr;
  auto *place = static_cast<int64_t *>(std::calloc(static_cast<size_t>(experts) + 1, 8));
  if (place == nullptr) return PyErr_NoMemory();
  bool good = true;
  for (int64_t nth = 0; nth < num_ids; nth++) {
    good = good && ids[nth] >= 0 && ids[nth] < experts;
    if (good) place[ids[nth] + 1]++;
  }
  if (good) {
    for (int64_t expert = 0; expert < experts; expert++) {
      counts[expert] = place[expert + 1];
      place[expert + 1] += place[expert];
    }
    for (int64_t nth = 0; nth < num_ids; nth++) {
      const int64_t at = place[ids[nth]]++;
      order[at] = nth;
      std::memcpy(to + at * row_bytes, rows + nth / top_k * stride_bytes,
                  static_cast<size_t>(row_bytes));
    }
  }
  std::free(place);
  if (good) Py_RETURN_NONE;
  PyErr_Format(PyExc_ValueError, "an id that is none of %lld experts'",
               static_cast<long long>(experts));
  return nullptr;
}

// Rows put to their places: row i to places[i].
PyObject *put_rows(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
  Arguments next(args, nargs, 5);
  char *to = next.at<char>();
  const char *rows = next.at<const char>();
  const int64_t row_bytes = next.size();
  const int64_t *places = next.at<const int64_t>();
  const int64_t count = next.size();
  if (!next.good()) return nullptr;
  for (int64_t nth = 0; nth < count; nth++) {
    std::memcpy(to + places[nth] * row_bytes, rows + nth * row_bytes,
                static_cast<size_t>(row_bytes));
  }
  Py_RETURN_NONE;
}

PyObject *draw(PyObject *, PyObject *const *args, Py_ssize_t nargs) {
  Arguments next(args, nargs, 7);
  auto *out = next.at<double>();
  auto *logits = next.at<const float>();
  auto *temperature = next.at<const double>();
  auto *noise = next.at<const uint64_t>();
  const int64_t num_rows = next.size(), size = next.size();
  auto *weights = next.at<double>();
  if (!next.good()) return nullptr;
  interlace::draw(out, logits, temperature, noise, num_rows, size, weights);
  Py_RETURN_NONE;
}

PyObject *instructions(PyObject *module, PyObject *) {
  auto *kernels = *static_cast<const interlace::Kernels **>(PyModule_GetState(module));
  return PyUnicode_FromString(kernels == nullptr ? "" : kernels->name);
}

// All names that `use` takes, the best first.
PyObject *choices(PyObject *, PyObject *) {
  const interlace::Kernels *found[MOST_KERNELS];
  const int count = runnable(found);
  PyObject *names = PyTuple_New(count);
  for (int nth = 0; names != nullptr && nth < count; nth++) {
    PyObject *name = PyUnicode_FromString(found[nth]->name);
    if (name == nullptr) Py_CLEAR(names);
    if (name != nullptr) PyTuple_SET_ITEM(names, nth, name);
  }
  return names;
}

PyObject *use(PyObject *module, PyObject *name) {
  const char *wanted = PyUnicode_AsUTF8(name);
  if (wanted == nullptr) return nullptr;
  const interlace::Kernels *found[MOST_KERNELS];
  const int count = runnable(found);
  for (int nth = 0; nth < count; nth++) {
    if (std::strcmp(found[nth]->name, wanted) != 0) continue;
    *static_cast<const interlace::Kernels **>(PyModule_GetState(module)) = found[nth];
    Py_RETURN_NONE;
  }
  PyErr_Format(PyExc_ValueError, "no kernels with %s run here", wanted);
  return nullptr;
}

PyObject *panel(PyObject *module, PyObject *) {
  const interlace::Kernels *kernels = kernels_of(module);
  return kernels == nullptr ? nullptr : PyLong_FromLongLong(kernels->panel);
}

#define TYPED(name, wanted)                                                              \
  {#name,                                                                                \
   reinterpret_cast<PyCFunction>(                                                        \
       reinterpret_cast<void (*)()>(by_size<name<bf16>, name<float>, wanted>)),          \
   METH_FASTCALL, nullptr}

#define PLAIN(name) \
  {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(name)), METH_FASTCALL, nullptr}

PyMethodDef methods[] = {
    {"instructions", instructions, METH_NOARGS, nullptr},
    {"choices", choices, METH_NOARGS, nullptr},
    {"use", use, METH_O, nullptr},
    {"panel", panel, METH_NOARGS, nullptr},
    TYPED(pack, 6),
    TYPED(multiply, 8),
    TYPED(experts, 7),
    TYPED(norm, 10),
    TYPED(choose, 9),
    TYPED(mix, 6),
    TYPED(turn_heads, 13),
    TYPED(attend, 12),
    TYPED(attention_block, 32),
    PLAIN(deal),
    PLAIN(put_rows),
    PLAIN(draw),
    {nullptr, nullptr, 0, nullptr},
};

int prepare(PyObject *module) {
  const interlace::Kernels *found[MOST_KERNELS];
  const bool any = runnable(found) > 0;
  *static_cast<const interlace::Kernels **>(PyModule_GetState(module)) = any ? found[0] : nullptr;
  return 0;
}

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void *>(prepare)},
    {0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "interlace.moe._kernels", nullptr, sizeof(interlace::Kernels *), methods,
    slots, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__kernels() { return PyModuleDef_Init(&definition); }
