/* support_float.c: the floating-point settings of a thread. */
#include "support_float.h"

#include <fenv.h>
#include <string.h>

#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>

static uint32_t control_get(void) { return _mm_getcsr(); }
static void control_put(uint32_t control) { _mm_setcsr(control); }

bool float_setting_flush_to_zero(void) {
    _mm_setcsr(_mm_getcsr() | 0x8040u);
    return true;
}

#else

static uint32_t control_get(void) { return 0; }
static void control_put(uint32_t control) { (void)control; }
bool float_setting_flush_to_zero(void) { return false; }

#endif

struct float_setting float_setting_get(void) {
    return (struct float_setting){fegetround(), control_get()};
}

void float_setting_put(struct float_setting setting) {
    (void)fesetround(setting.rounding);
    control_put(setting.control);
}

float support_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

uint32_t support_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

float support_nan(void) { return support_float(0x7FC00000u); }

float support_infinity(void) { return support_float(0x7F800000u); }
