/* base/cpu.c: CPU features, by cpuid or from the operating system. Compiled without any of the flags it detects. */
#include "opaq/cpu.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>

/* The register files that the operating system saves (XCR0). */
static uint64_t saved_registers(void) {
    unsigned low;
    unsigned high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t)high << 32) | low;
}

/* Intel's processors multiply pairs of bfloat16 more slowly than they multiply floats, as measured on Sapphire Rapids. */
static int has_slow_bf16(void) {
    unsigned a;
    unsigned b;
    unsigned c;
    unsigned d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_INTEL_ebx && c == signature_INTEL_ecx &&
           d == signature_INTEL_edx;
}

static uint32_t detect(void) {
    unsigned a;
    unsigned b;
    unsigned c;
    unsigned d;
    uint32_t found = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) {
        return 0;
    }
    const unsigned osxsave = 1u << 27;
    const unsigned fma_f16c = (1u << 12) | (1u << 29);
    const int has_fma_f16c = (c & fma_f16c) == fma_f16c;
    if ((c & osxsave) == 0) {
        return 0;
    }
    const uint64_t registers = saved_registers();
    const int ymm = (registers & 0x6) == 0x6;
    const int zmm = (registers & 0xE6) == 0xE6;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        return 0;
    }
    if (ymm && has_fma_f16c && (b & (1u << 5))) {
        found |= OPAQ_CPU_AVX2;
    }
    const unsigned f_dq_bw_vl = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);
    if (zmm && (found & OPAQ_CPU_AVX2) && (b & f_dq_bw_vl) == f_dq_bw_vl) {
        found |= OPAQ_CPU_AVX512;
        found |= (c & (1u << 1)) ? OPAQ_CPU_AVX512_VBMI : 0;
        found |= (c & (1u << 11)) ? OPAQ_CPU_AVX512_VNNI : 0;
        if (!has_slow_bf16() && __get_cpuid_count(7, 1, &a, &b, &c, &d)) {
            found |= (a & (1u << 5)) ? OPAQ_CPU_AVX512_BF16 : 0;
        }
    }
    return found;
}

#elif defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#endif

/* Every AArch64 processor has NEON. Later features come from Linux's hwcaps; elsewhere, from the compiler's
 * target. */
static uint32_t detect(void) {
#if defined(__ARM_FEATURE_DOTPROD)
    return OPAQ_CPU_NEON | OPAQ_CPU_DOTPROD;
#elif defined(__linux__)
    const unsigned long asimd_dot_products = 1ul << 20; /* HWCAP_ASIMDDP */
    return OPAQ_CPU_NEON | (getauxval(AT_HWCAP) & asimd_dot_products ? OPAQ_CPU_DOTPROD : 0);
#else
    return OPAQ_CPU_NEON;
#endif
}

#else

static uint32_t detect(void) { return 0; }

#endif

/* In the order of the bits. */
static const char *const feature_names[] = {"avx2",       "avx512", "avx512vbmi", "avx512vnni",
                                            "avx512bf16", "neon",   "dotprod"};
enum { FEATURE_COUNT = sizeof feature_names / sizeof feature_names[0] };

/* The features that OPAQ_CPU allows: the named one and those it requires, none for "ref". Any other value
 * allows all; opaq_cpu_check rejects it. */
static uint32_t allowed(void) {
    static const uint32_t with[FEATURE_COUNT] = {OPAQ_CPU_AVX2,
                                                 OPAQ_CPU_AVX2 | OPAQ_CPU_AVX512,
                                                 OPAQ_CPU_AVX2 | OPAQ_CPU_AVX512 | OPAQ_CPU_AVX512_VBMI,
                                                 OPAQ_CPU_AVX2 | OPAQ_CPU_AVX512 | OPAQ_CPU_AVX512_VNNI,
                                                 OPAQ_CPU_AVX2 | OPAQ_CPU_AVX512 | OPAQ_CPU_AVX512_BF16,
                                                 OPAQ_CPU_NEON,
                                                 OPAQ_CPU_NEON | OPAQ_CPU_DOTPROD};
    const char *const name = getenv("OPAQ_CPU");
    if (name == NULL) {
        return ~0u;
    }
    for (int i = 0; i < FEATURE_COUNT; ++i) {
        if (strcmp(name, feature_names[i]) == 0) {
            return with[i];
        }
    }
    return strcmp(name, "ref") == 0 ? 0 : ~0u;
}

/* Detected once. Two threads may both detect; the results are equal. */
uint32_t opaq_cpu_features(void) {
    static _Atomic uint32_t cache;
    const uint32_t known = 0x80000000u;
    uint32_t features = atomic_load_explicit(&cache, memory_order_relaxed);
    if (features == 0) {
        features = (detect() & allowed()) | known;
        atomic_store_explicit(&cache, features, memory_order_relaxed);
    }
    return features & ~known;
}

enum opaq_status opaq_cpu_check(struct opaq_error *error) {
    const char *const name = getenv("OPAQ_CPU");
    if (name == NULL || name[0] == '\0' || strcmp(name, "ref") == 0) {
        return OPAQ_OK;
    }
    char known[128];
    for (int i = 0; i < FEATURE_COUNT; ++i) {
        if (strcmp(name, feature_names[i]) == 0) {
            return OPAQ_OK;
        }
    }
    (void)opaq_cpu_describe(~0u, known, sizeof known);
    return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "OPAQ_CPU is \"%.80s\", expected one of: ref %s", name, known);
}

size_t opaq_cpu_describe(uint32_t features, char *buffer, size_t capacity) {
    size_t length = 0;
    capacity = buffer == NULL ? 0 : capacity;
    if (capacity > 0) {
        buffer[0] = '\0';
    }
    for (unsigned i = 0; i < FEATURE_COUNT; ++i) {
        if (features & (1u << i)) {
            const size_t room = length < capacity ? capacity - length : 0;
            length += (size_t)snprintf(room ? buffer + length : NULL, room, "%s%s", length ? " " : "",
                                       feature_names[i]);
        }
    }
    return length;
}
