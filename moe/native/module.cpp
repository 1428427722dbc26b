// interlace.moe._kernels: the best kernels this processor runs, over addresses of tensors.
//
// Nothing is checked here but the number of arguments: shapes and types are kernels.py's business.

#include <cstring>

#include "attention_block.h"
#include "dealing.h"
#include "drawing.h"
#include "ends.h"
#include "layout.h"
#include "methods.h"
#include "straight.h"

namespace {

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
    TYPED(experts, 9),
    TYPED(experts_apart, 10),
    TYPED(norm, 10),
    TYPED(choose, 9),
    TYPED(mix, 9),
    TYPED(turn_heads, 13),
    TYPED(attend, 12),
    TYPED(attention_block, 32),
    TYPED(attention_block_apart, 33),
    TYPED(finish, 14),
    TYPED(straight, 19),
    PLAIN(compute_on),
    PLAIN(go_on),
    PLAIN(go_on_beside),
    PLAIN(spent),
    PLAIN(deal),
    PLAIN(by_expert),
    PLAIN(lay_out),
    PLAIN(take_rows),
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
