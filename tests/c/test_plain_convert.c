/* test_plain_convert.c: every instruction set's conversions of f32, bf16 and f16 have the bits of plain_row.h's: all codes,
 * floats of every exponent, the numbers between two neighbours, every length. */
#include <string.h>

#include "check.h"
#include "cpu/gemm/plain_convert.h"
#include "opaq/cpu.h"

enum { MOST = 4096 };

static const enum opaq_element dtypes[] = {OPAQ_F32, OPAQ_BF16, OPAQ_F16};

static void compare(const struct plain_table *table, enum opaq_element dtype, const uint32_t *bits, int n) {
    float from[MOST];
    static unsigned char stored[2][(MOST + 4) * sizeof(float)];
    static float loaded[2][MOST + 4];
    memcpy(from, bits, (size_t)n * sizeof *from);
    memset(stored, 0x5a, sizeof stored);
    memset(loaded, 0x5a, sizeof loaded);
    plain_row_store(stored[0], dtype, 0, 1, n, from);
    table->store(stored[1], dtype, n, from);
    CHECK_BYTES(stored[1], stored[0], sizeof stored[0], "%s stores %d, dtype %d, from %08x on", table->name, n,
                (int)dtype, (unsigned)bits[0]);
    plain_row_load(bits, dtype, 0, 1, n, loaded[0]);
    table->load(bits, dtype, n, loaded[1]);
    CHECK_BYTES(loaded[1], loaded[0], sizeof loaded[0], "%s loads %d, dtype %d, from %08x on", table->name, n,
                (int)dtype, (unsigned)bits[0]);
}

static void tables_agree(void) {
    static uint32_t bits[MOST];
    int count;
    const struct plain_table *const *tables = plain_tables(&count);
    for (int t = 0; t < count; ++t) {
        for (int d = 0; d < 3 && (tables[t]->features & ~opaq_cpu_features()) == 0; ++d) {
            for (uint32_t part = 0; part < 64; ++part) {
                for (uint32_t i = 0; i < MOST; ++i) {
                    /* low bits around the rounding position: halves, and slightly less or more */
                    static const uint32_t low[] = {0, 0x8000, 0x7fff, 0x8001, 0x1000, 0x0fff, 0x1001, 0xffff};
                    const uint32_t number = part * MOST + i;
                    bits[i] = (number / 4 << 16) | low[(number + number / 4) % 8];
                }
                compare(tables[t], dtypes[d], bits, MOST);
            }
            for (int n = 0; n < 130; ++n) {
                compare(tables[t], dtypes[d], bits + 7 * n, n);
            }
        }
    }
}

/* By the steps and lengths that callers use. */
static void any_step(void) {
    static uint16_t codes[3000];
    float expected[256];
    float actual[256];
    for (int i = 0; i < 3000; ++i) {
        codes[i] = (uint16_t)(i * 31);
    }
    for (int n = 0; n <= 256; n += n < 40 ? 1 : 27) {
        for (int64_t step = 1; step < 9; step += 3) {
            plain_row_load(codes, OPAQ_BF16, 5, step, n, expected);
            plain_load(codes, OPAQ_BF16, 5, step, n, actual);
            CHECK_BYTES(actual, expected, (size_t)n * sizeof *actual, "%d, %d apart", n, (int)step);
        }
    }
}

static const struct test_case tests[] = {TEST(tables_agree), TEST(any_step)};
TEST_MAIN(tests)
