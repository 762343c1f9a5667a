/* base/cpu.c: CPU features by cpuid. Compiled without any of the flags it detects. */
#include "opaq/cpu.h"

#include <stdio.h>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>

/* Which register files the operating system saves. */
static uint64_t saved_registers(void) {
    unsigned low;
    unsigned high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t)high << 32) | low;
}

uint32_t opaq_cpu_features(void) {
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
        if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) {
            found |= (a & (1u << 5)) ? OPAQ_CPU_AVX512_BF16 : 0;
        }
    }
    return found;
}

#elif defined(__aarch64__)

uint32_t opaq_cpu_features(void) { return OPAQ_CPU_NEON; }

#else

uint32_t opaq_cpu_features(void) { return 0; }

#endif

static const char *const feature_names[] = {"avx2", "avx512", "avx512vbmi", "avx512vnni", "avx512bf16", "neon"};

size_t opaq_cpu_describe(uint32_t features, char *buffer, size_t capacity) {
    size_t length = 0;
    if (capacity > 0) {
        buffer[0] = '\0';
    }
    for (unsigned i = 0; i < sizeof feature_names / sizeof feature_names[0]; ++i) {
        if (features & (1u << i)) {
            const size_t room = length < capacity ? capacity - length : 0;
            length += (size_t)snprintf(room ? buffer + length : NULL, room, "%s%s", length ? " " : "",
                                       feature_names[i]);
        }
    }
    return length;
}
