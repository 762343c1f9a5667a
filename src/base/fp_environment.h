/* base/fp_environment.h: a fixed floating-point environment, independent of the caller's. Depends on nothing.
 *
 * A process may run with flush-to-zero on (torch.set_flush_denormal) or another rounding mode. The bytes a
 * quantizer produces must not depend on that, so every kernel call runs between enter and leave, on the thread
 * that does the work. */
#ifndef OPAQ_BASE_FP_ENVIRONMENT_H
#define OPAQ_BASE_FP_ENVIRONMENT_H

#include <stdint.h>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>

/* All exceptions masked, round to nearest, no flush to zero, no denormals-are-zero. Returns the previous state. */
static inline uint64_t fp_environment_enter(void) {
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(0x1F80u);
    return saved;
}

static inline void fp_environment_leave(uint64_t saved) { _mm_setcsr((unsigned)saved); }

#elif defined(__aarch64__)

static inline uint64_t fp_environment_enter(void) {
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return saved;
}

static inline void fp_environment_leave(uint64_t saved) { __asm__ volatile("msr fpcr, %0" : : "r"(saved)); }

#else
#include <fenv.h>

static inline uint64_t fp_environment_enter(void) {
    const int saved = fegetround();
    (void)fesetround(FE_TONEAREST);
    return (uint64_t)saved;
}

static inline void fp_environment_leave(uint64_t saved) { (void)fesetround((int)saved); }

#endif

#endif
