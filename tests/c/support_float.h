/* support_float.h: the floating-point settings of a thread, for tests that change them, and special numbers that do
 * not depend on them. Depends on the C library only. */
#ifndef SUPPORT_FLOAT_H
#define SUPPORT_FLOAT_H

#include <stdbool.h>
#include <stdint.h>

/* Rounding mode, flush-to-zero and sticky exceptions: everything that a caller can set. */
struct float_setting {
    int rounding;
    uint32_t control; /* MXCSR on x86, 0 elsewhere */
};

struct float_setting float_setting_get(void);
void float_setting_put(struct float_setting setting);

/* Flushes results below the normal range to 0 and treats such operands as 0; false if this machine cannot. */
bool float_setting_flush_to_zero(void);

float support_nan(void);
float support_infinity(void);

/* Made from bits, so independent of the settings. */
uint32_t support_bits(float value);
float support_float(uint32_t bits);

#endif
