// What code that is built with -fsanitize=thread calls beside its loads and stores (races.cpp): its
// atomics, which order nothing here, and what nobody wants to know.
#define EFFINFER_ATOMICS(bits, Number)                                                      \
  Number __tsan_atomic##bits##_load(const volatile void* from, int) {                       \
    return __atomic_load_n(static_cast<const volatile Number*>(from), __ATOMIC_SEQ_CST);    \
  }                                                                                         \
  void __tsan_atomic##bits##_store(volatile void* to, Number value, int) {                  \
    __atomic_store_n(static_cast<volatile Number*>(to), value, __ATOMIC_SEQ_CST);           \
  }                                                                                         \
  Number __tsan_atomic##bits##_exchange(volatile void* at, Number value, int) {             \
    return __atomic_exchange_n(static_cast<volatile Number*>(at), value, __ATOMIC_SEQ_CST); \
  }                                                                                         \
  Number __tsan_atomic##bits##_fetch_add(volatile void* at, Number value, int) {            \
    return __atomic_fetch_add(static_cast<volatile Number*>(at), value, __ATOMIC_SEQ_CST);  \
  }                                                                                         \
  Number __tsan_atomic##bits##_fetch_sub(volatile void* at, Number value, int) {            \
    return __atomic_fetch_sub(static_cast<volatile Number*>(at), value, __ATOMIC_SEQ_CST);  \
  }                                                                                         \
  bool __tsan_atomic##bits##_compare_exchange_strong(volatile void* at, void* expected,     \
                                                     Number value, int, int) {              \
    return __atomic_compare_exchange_n(static_cast<volatile Number*>(at),                   \
                                       static_cast<Number*>(expected), value, false,        \
                                       __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);                 \
  }                                                                                         \
  bool __tsan_atomic##bits##_compare_exchange_weak(volatile void* at, void* expected,       \
                                                   Number value, int, int) {                \
    return __tsan_atomic##bits##_compare_exchange_strong(at, expected, value, 0, 0);        \
  }

extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
EFFINFER_ATOMICS(8, unsigned char)
EFFINFER_ATOMICS(16, unsigned short)
EFFINFER_ATOMICS(32, unsigned int)
EFFINFER_ATOMICS(64, unsigned long)
void __tsan_atomic_thread_fence(int) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
void __tsan_atomic_signal_fence(int) {}
}
