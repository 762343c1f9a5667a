/* test_packed_prepare.c: the conversion of rows of x before products with tiled weights, for every table that
 * this machine can run, against definitions of one number at a time. */
#include <float.h>
#include <math.h>

#include "../cases/packed_operands.h"
#include "base/float_bits.h"
#include "check.h"
#include "format/element_codec.h"
#include "opaq/cpu.h"

enum { PREPARE_LIMIT = 256 };

/* Every table against the definition, for every length: a float at a time, with functions of the C library. */
static void check_prepare(const struct packed_prepare *table, int n, const float *x) {
    int8_t q8[PREPARE_LIMIT];
    int16_t q16[PREPARE_LIMIT];
    float amax = 0.0f;
    for (int i = 0; i < n; ++i) {
        amax = fmaxf(amax, fabsf(x[i]));
    }
    CHECK_EQ_INT(float_to_bits(table->finite_amax(x, n)), float_to_bits(amax));
    table->to_int8(x, n, 127.0f / 8.0f, q8);
    table->to_int16(x, n, 32767.0f / 8.0f, q16);
    for (int i = 0; i < n; ++i) {
        CHECK_EQ_INT(q8[i], lrintf(x[i] * (127.0f / 8.0f)));
        CHECK_EQ_INT(q16[i], lrintf(x[i] * (32767.0f / 8.0f)));
    }
}

/* A NaN or infinity is noticed at any position. */
static void check_prepare_specials(const struct packed_prepare *table) {
    static const float specials[] = {INFINITY, -INFINITY, NAN, -NAN};
    float x[PREPARE_LIMIT] = {1.0f};
    for (int i = 0; i < PREPARE_LIMIT; i += 5) {
        for (int s = 0; s < 4; ++s) {
            const float before = x[i];
            x[i] = specials[s];
            CHECK(isnan(table->finite_amax(x, PREPARE_LIMIT)));
            x[i] = before;
        }
    }
    x[7] = -FLT_MAX;
    CHECK_EQ_INT(float_to_bits(table->finite_amax(x, PREPARE_LIMIT)), float_to_bits(FLT_MAX));
}

static void check_prepare_codes(const struct packed_prepare *table) {
    uint8_t pairs[PREPARE_LIMIT];
    int8_t q[2 * PREPARE_LIMIT];
    int32_t correction[2 * PREPARE_LIMIT / 16];
    for (int i = 0; i < PREPARE_LIMIT; ++i) {
        pairs[i] = (uint8_t)(i * 37);
    }
    table->codes_to_int8(pairs, PREPARE_LIMIT, q);
    table->correct(q, 2 * PREPARE_LIMIT / 16, correction);
    for (int i = 0; i < 2 * PREPARE_LIMIT; i += 16) {
        int32_t sum = 0;
        for (int j = i; j < i + 16; ++j) {
            const uint32_t code = pairs[j / 2] >> (j % 2 * 4) & 15;
            CHECK_EQ_INT(q[j], (int)(2.0f * decode_e2m1(code)));
            sum += q[j];
        }
        CHECK_EQ_INT(correction[i / 16], -12 * sum);
    }
}

static void preparing_is_as_defined(void) {
    static float x[PREPARE_LIMIT];
    int count;
    const struct packed_prepare *const *tables = packed_prepare_tables(&count);
    uint64_t state = 5;
    for (int i = 0; i < PREPARE_LIMIT; ++i) { /* also ties */
        x[i] = i % 3 == 0 ? ((float)(i % 31) - 15.5f) * (8.0f / 127.0f) : 8.0f * packed_random_float(&state);
    }
    for (int t = 0; t < count; ++t) {
        if ((tables[t]->features & ~opaq_cpu_features()) == 0) {
            for (int n = 1; n <= PREPARE_LIMIT; n += n < 70 ? 1 : 31) {
                check_prepare(tables[t], n, x);
            }
            check_prepare_specials(tables[t]);
            check_prepare_codes(tables[t]);
        }
    }
    CHECK_EQ_STR(tables[count - 1]->name, "prepare_ref");
}

static const struct test_case tests[] = {TEST(preparing_is_as_defined)};
TEST_MAIN(tests)
