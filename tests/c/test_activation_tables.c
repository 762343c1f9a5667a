/* test_activation_tables.c: activations of every instruction set give the reference's bytes: all activations
 * and dtypes, every bf16 number and special values, runs of every length. */
#include <math.h>
#include <string.h>

#include "check.h"
#include "cpu/moe/activation_table.h"
#include "opaq/cpu.h"
#include "support_experts.h"

static const enum opaq_element dtypes[] = {OPAQ_F32, OPAQ_BF16, OPAQ_F16};

/* Neighbouring numbers with unrelated bits: the index times a large constant. */
static float number_at(uint32_t i) {
    const uint32_t bits = i < 65536 ? i << 16 : i * 2654435761u;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void compare(const struct activation_table *table, const struct opaq_experts_plan *plan,
                    enum opaq_element dtype, uint32_t first, int n, const char *what) {
    float inputs[2][ACTIVATION_SEGMENT];
    float g[2][ACTIVATION_SEGMENT];
    float u[2][ACTIVATION_SEGMENT];
    unsigned char a[2][(ACTIVATION_SEGMENT + 1) * sizeof(float)];
    for (int i = 0; i < n; ++i) {
        inputs[0][i] = number_at(first + (uint32_t)i);
        inputs[1][i] = number_at((first + (uint32_t)i) * 7919u % 131072u);
    }
    for (int t = 0; t < 2; ++t) {
        memcpy(g[t], inputs[0], sizeof g[t]);
        memcpy(u[t], inputs[1], sizeof u[t]);
        memset(a[t], 0x5a, sizeof a[t]);
        (t == 0 ? &activation_table_ref : table)->run(plan, dtype, g[t], u[t], n, a[t]);
    }
    CHECK_BYTES(a[1], a[0], sizeof a[0], "%s, %s, dtype %d, from number %u on, %d of them", table->name, what,
                (int)dtype, (unsigned)first, n);
}

static void tables_agree(void) {
    int count;
    const struct activation_table *const *tables = activation_tables(&count);
    for (int t = 0; t < count; ++t) {
        if ((tables[t]->features & ~opaq_cpu_features()) != 0) {
            continue;
        }
        for (int p = 0; p < OPAQ_ACTIVATION_COUNT; ++p) {
            const struct opaq_experts_plan plan = experts_plan_of(experts_activations[p]);
            for (int d = 0; d < 3; ++d) {
                for (uint32_t first = 0; first < 131072; first += ACTIVATION_SEGMENT) {
                    compare(tables[t], &plan, dtypes[d], first, ACTIVATION_SEGMENT, experts_activations[p]);
                }
                for (int n = 0; n < 70; ++n) {
                    compare(tables[t], &plan, dtypes[d], 16000 + 31 * (uint32_t)n, n, experts_activations[p]);
                }
            }
        }
    }
}

static const struct test_case tests[] = {TEST(tables_agree)};
TEST_MAIN(tests)
