/* test_proto.c: the buffers of a prototype, compared with the table "Buffers" of docs/formats.md: as numbers
 * for chosen shapes, and by its formulas for every spec. Texts and limits: test_proto_text.c,
 * test_proto_limits.c. */
#include "check.h"
#include "support_spec.h"
#include "support_tensor.h"

struct expected_buffer {
    const char *name;
    enum opaq_role role;
    int usage;
    enum opaq_element element;
    int rank;
    int64_t shape[OPAQ_RANK_LIMIT];
};

/* ---- numbers ---- */

struct literal {
    const char *spec;
    int rank;
    int64_t shape[OPAQ_RANK_LIMIT];
    int count;
    struct expected_buffer buffer[OPAQ_BUFFER_LIMIT];
};

/* clang-format off */
#define DATA(name, usage, element, ...)  {name, OPAQ_ROLE_DATA, usage, element, __VA_ARGS__}
#define SCALE(name, usage, element, ...) {name, OPAQ_ROLE_SCALE, usage, element, __VA_ARGS__}
#define AMAX(name, usage, ...)           {name, OPAQ_ROLE_AMAX, usage, OPAQ_F32, __VA_ARGS__}

static const struct literal literals[] = {
    {"fp8+both", 3, {3, 5, 100}, 3, {
        DATA("_data", 1, OPAQ_E4M3, 3, {3, 5, 100}),
        DATA("_transpose", 2, OPAQ_E4M3, 3, {100, 3, 5}),
        SCALE("_scale_inv", 3, OPAQ_F32, 1, {1})}},
    {"fp8row+both", 3, {3, 5, 100}, 4, {
        DATA("_rowwise_data", 1, OPAQ_E4M3, 3, {3, 5, 100}),
        SCALE("_rowwise_scale_inv", 1, OPAQ_F32, 2, {15, 1}),
        DATA("_columnwise_data", 2, OPAQ_E4M3, 3, {100, 3, 5}),
        SCALE("_columnwise_scale_inv", 2, OPAQ_F32, 2, {100, 1})}},
    {"fp8blk1.e5m2+both", 3, {3, 5, 100}, 4, {
        DATA("_rowwise_data", 1, OPAQ_E5M2, 3, {3, 5, 100}),
        SCALE("_rowwise_scale_inv", 1, OPAQ_F32, 2, {1, 16}),
        DATA("_columnwise_data", 2, OPAQ_E5M2, 3, {100, 3, 5}),
        SCALE("_columnwise_scale_inv", 2, OPAQ_F32, 2, {1, 100})}},
    {"fp8blk1+both", 2, {200, 301}, 4, {
        DATA("_rowwise_data", 1, OPAQ_E4M3, 2, {200, 301}),
        SCALE("_rowwise_scale_inv", 1, OPAQ_F32, 2, {3, 200}),
        DATA("_columnwise_data", 2, OPAQ_E4M3, 2, {301, 200}),
        SCALE("_columnwise_scale_inv", 2, OPAQ_F32, 2, {2, 304})}},
    {"fp8blk2+both", 2, {200, 300}, 4, {
        DATA("_rowwise_data", 1, OPAQ_E4M3, 2, {200, 300}),
        SCALE("_rowwise_scale_inv", 1, OPAQ_F32, 2, {2, 4}),
        DATA("_columnwise_data", 2, OPAQ_E4M3, 2, {300, 200}),
        SCALE("_columnwise_scale_inv", 2, OPAQ_F32, 2, {3, 4})}},
    {"fp8blk2+columnwise", 2, {700, 129}, 2, {
        DATA("_columnwise_data", 2, OPAQ_E4M3, 2, {129, 700}),
        SCALE("_columnwise_scale_inv", 2, OPAQ_F32, 2, {2, 8})}},
    {"mxfp8+both", 3, {3, 5, 100}, 4, {
        DATA("_rowwise_data", 1, OPAQ_E4M3, 3, {3, 5, 100}),
        SCALE("_rowwise_scale_inv", 1, OPAQ_E8M0, 2, {128, 4}),
        DATA("_columnwise_data", 2, OPAQ_E4M3, 3, {3, 5, 100}),
        SCALE("_columnwise_scale_inv", 2, OPAQ_E8M0, 2, {4, 128})}},
    {"mxfp8.e5m2+both+2d+swizzle", 2, {200, 300}, 4, {
        DATA("_rowwise_data", 1, OPAQ_E5M2, 2, {200, 300}),
        SCALE("_rowwise_scale_inv", 1, OPAQ_E8M0, 2, {256, 12}),
        DATA("_columnwise_data", 2, OPAQ_E5M2, 2, {200, 300}),
        SCALE("_columnwise_scale_inv", 2, OPAQ_E8M0, 2, {8, 384})}},
    {"mxfp4+both", 3, {3, 5, 100}, 4, {
        DATA("_rowwise_data", 1, OPAQ_E2M1, 3, {3, 5, 64}),
        SCALE("_rowwise_scale_inv", 1, OPAQ_E8M0, 2, {128, 4}),
        DATA("_columnwise_data", 2, OPAQ_E2M1, 3, {3, 5, 64}),
        SCALE("_columnwise_scale_inv", 2, OPAQ_E8M0, 2, {4, 128})}},
    {"mxfp4+both", 2, {200, 300}, 4, {
        DATA("_rowwise_data", 1, OPAQ_E2M1, 2, {200, 160}),
        SCALE("_rowwise_scale_inv", 1, OPAQ_E8M0, 2, {256, 12}),
        DATA("_columnwise_data", 2, OPAQ_E2M1, 2, {200, 160}),
        SCALE("_columnwise_scale_inv", 2, OPAQ_E8M0, 2, {8, 384})}},
    {"nvfp4+both", 3, {3, 5, 100}, 6, {
        DATA("_rowwise_data", 1, OPAQ_E2M1, 3, {3, 5, 56}),
        SCALE("_rowwise_scale_inv", 1, OPAQ_E4M3, 2, {128, 8}),
        DATA("_columnwise_data", 2, OPAQ_E2M1, 2, {100, 8}),
        SCALE("_columnwise_scale_inv", 2, OPAQ_E4M3, 2, {128, 4}),
        AMAX("_amax_rowwise", 1, 1, {1}),
        AMAX("_amax_columnwise", 2, 1, {1})}},
    {"nvfp4+both+rowscaled", 2, {200, 300}, 6, {
        DATA("_rowwise_data", 1, OPAQ_E2M1, 2, {200, 152}),
        SCALE("_rowwise_scale_inv", 1, OPAQ_E4M3, 2, {256, 20}),
        DATA("_columnwise_data", 2, OPAQ_E2M1, 2, {300, 104}),
        SCALE("_columnwise_scale_inv", 2, OPAQ_E4M3, 2, {384, 16}),
        AMAX("_amax_rowwise", 1, 1, {200}),
        AMAX("_amax_columnwise", 2, 1, {300})}},
    {"nvfp4+columnwise+rht", 1, {33}, 3, {
        DATA("_columnwise_data", 2, OPAQ_E2M1, 2, {33, 8}),
        SCALE("_columnwise_scale_inv", 2, OPAQ_E4M3, 2, {128, 4}),
        AMAX("_amax_columnwise", 2, 1, {1})}},
    {"nvfp4", 1, {33}, 3, {
        DATA("_rowwise_data", 1, OPAQ_E2M1, 1, {24}),
        SCALE("_rowwise_scale_inv", 1, OPAQ_E4M3, 2, {128, 4}),
        AMAX("_amax_rowwise", 1, 1, {1})}},
    {"fp8+both", 1, {33}, 3, {
        DATA("_data", 1, OPAQ_E4M3, 1, {33}),
        DATA("_transpose", 2, OPAQ_E4M3, 1, {33}),
        SCALE("_scale_inv", 3, OPAQ_F32, 1, {1})}},
    {"fp8row+columnwise", 8, {1, 2, 1, 3, 1, 1, 2, 5}, 2, {
        DATA("_columnwise_data", 2, OPAQ_E4M3, 8, {5, 1, 2, 1, 3, 1, 1, 2}),
        SCALE("_columnwise_scale_inv", 2, OPAQ_F32, 2, {5, 1})}},
    {"nvfp4+both", 2, {0, 64}, 6, {
        DATA("_rowwise_data", 1, OPAQ_E2M1, 2, {0, 32}),
        SCALE("_rowwise_scale_inv", 1, OPAQ_E4M3, 2, {0, 4}),
        DATA("_columnwise_data", 2, OPAQ_E2M1, 2, {64, 0}),
        SCALE("_columnwise_scale_inv", 2, OPAQ_E4M3, 2, {128, 0}),
        AMAX("_amax_rowwise", 1, 1, {1}),
        AMAX("_amax_columnwise", 2, 1, {1})}},
    {"fp8row+both", 2, {3, 0}, 4, {
        DATA("_rowwise_data", 1, OPAQ_E4M3, 2, {3, 0}),
        SCALE("_rowwise_scale_inv", 1, OPAQ_F32, 2, {3, 1}),
        DATA("_columnwise_data", 2, OPAQ_E4M3, 2, {0, 3}),
        SCALE("_columnwise_scale_inv", 2, OPAQ_F32, 2, {0, 1})}},
};
/* clang-format on */

static struct opaq_proto make(const int64_t *shape, int rank, const struct opaq_spec *spec) {
    struct opaq_proto proto;
    struct opaq_error error;
    memset(&proto, 0, sizeof proto);
    if (opaq_proto_make(shape, rank, OPAQ_BF16, spec, tensor_cpu, &proto, &error) != OPAQ_OK) {
        CHECK_FAIL("%s", error.text);
    }
    return proto;
}

/* Bytes per entry, calculated by hand. */
static int entry_bytes_of(enum opaq_element element) {
    return element == OPAQ_F32 ? 4 : element == OPAQ_F16 || element == OPAQ_BF16 ? 2 : 1;
}

static void compare(const struct opaq_proto *proto, const struct expected_buffer *expected, int count,
                    const char *what) {
    size_t total = 0;
    if (opaq_proto_buffer_count(proto) != count) {
        CHECK_FAIL("%s: %d buffers, expected %d", what, opaq_proto_buffer_count(proto), count);
        return;
    }
    for (int i = 0; i < count; ++i) {
        const struct expected_buffer *e = &expected[i];
        struct opaq_buffer b;
        CHECK_EQ_INT(opaq_proto_buffer(proto, i, &b, NULL), OPAQ_OK);
        int same = strcmp(b.name, e->name) == 0 && b.role == e->role && b.usage == e->usage &&
                   b.element == e->element && b.rank == e->rank;
        same &= b.packing == (e->element == OPAQ_E2M1 ? 2 : 1) && b.entry_bytes == entry_bytes_of(e->element);
        size_t bytes = (size_t)entry_bytes_of(e->element);
        int64_t stride = 1;
        for (int d = e->rank - 1; d >= 0; --d) {
            same &= b.shape[d] == e->shape[d] && b.strides[d] == stride;
            stride *= e->shape[d] > 1 ? e->shape[d] : 1;
            bytes *= (size_t)e->shape[d];
        }
        for (int d = e->rank; d < OPAQ_RANK_LIMIT; ++d) {
            same &= b.shape[d] == 0 && b.strides[d] == 0;
        }
        if (!same || b.bytes != bytes) {
            CHECK_FAIL("%s: buffer %d is %s rank %d (%lld, %lld, ...) of %zu bytes, expected %s rank %d (%lld, "
                       "%lld, ...) "
                       "of %zu",
                       what, i, b.name, b.rank, (long long)b.shape[0], (long long)b.shape[1], b.bytes, e->name,
                       e->rank, (long long)e->shape[0], (long long)e->shape[1], bytes);
        }
        total += bytes;
        if (e->usage != OPAQ_BOTH) {
            CHECK_EQ_INT(opaq_proto_find(proto, e->role, (enum opaq_usage)e->usage), i);
        }
    }
    size_t actual = 0;
    CHECK_EQ_INT(opaq_proto_bytes(proto, &actual, NULL), OPAQ_OK);
    CHECK_EQ_INT(actual, total);
}

static void shapes_as_numbers(void) {
    for (size_t i = 0; i < sizeof literals / sizeof literals[0]; ++i) {
        const struct literal *l = &literals[i];
        const struct opaq_spec spec = spec_of(l->spec);
        const struct opaq_proto proto = make(l->shape, l->rank, &spec);
        compare(&proto, l->buffer, l->count, l->spec);
    }
}

/* ---- formulas: docs/formats.md, "Buffers" ---- */

static int64_t cd(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t ru(int64_t a, int64_t b) { return cd(a, b) * b; }

/* A data buffer in which M is replaced by the leading dimensions; transposed: (K, M). */
static struct expected_buffer leading(const char *name, int usage, int element, const int64_t *shape, int rank,
                                      int64_t k, int transposed) {
    struct expected_buffer e = {name, OPAQ_ROLE_DATA, usage, (enum opaq_element)element, rank, {0}};
    for (int i = 0; i + 1 < rank; ++i) {
        e.shape[i + transposed] = shape[i];
    }
    e.shape[transposed ? 0 : rank - 1] = k;
    return e;
}

static struct expected_buffer matrix(const char *name, enum opaq_role role, int usage,
                                     enum opaq_element element, int64_t a, int64_t b) {
    return (struct expected_buffer){name, role, usage, element, 2, {a, b}};
}

static struct expected_buffer vector(const char *name, enum opaq_role role, int usage, int64_t n) {
    return (struct expected_buffer){name, role, usage, OPAQ_F32, 1, {n}};
}

/* All rows of the table for a format, in its order; the caller drops those of other usages. */
static int table_of(const struct opaq_spec *s, const int64_t *shape, int rank, struct expected_buffer e[6]) {
    const char *const names[4] = {"_rowwise_data", "_rowwise_scale_inv", "_columnwise_data",
                                  "_columnwise_scale_inv"};
    const int64_t k = shape[rank - 1];
    int64_t m = 1;
    for (int i = 0; i + 1 < rank; ++i) {
        m *= shape[i];
    }
    const int scale_is_f32 = s->format <= OPAQ_FP8BLK2;
    const enum opaq_element scale = scale_is_f32 ? OPAQ_F32 : s->format == OPAQ_NVFP4 ? OPAQ_E4M3 : OPAQ_E8M0;
    int64_t rs[2] = {m, 1};
    int64_t cs[2] = {k, 1};
    int64_t packed = k;
    int transposed = s->format != OPAQ_MXFP8 && s->format != OPAQ_MXFP4;
    switch ((enum opaq_format)s->format) {
    case OPAQ_FP8:
        e[0] = leading("_data", OPAQ_ROWWISE, s->element, shape, rank, k, 0);
        e[1] = leading("_transpose", OPAQ_COLUMNWISE, s->element, shape, rank, k, 1);
        e[2] = vector("_scale_inv", OPAQ_ROLE_SCALE, OPAQ_BOTH, 1);
        return 3;
    case OPAQ_FP8ROW:
        break;
    case OPAQ_FP8BLK1:
        rs[0] = cd(k, 128), rs[1] = ru(m, 4), cs[0] = cd(m, 128), cs[1] = ru(k, 4);
        break;
    case OPAQ_FP8BLK2:
        rs[0] = cd(m, 128), rs[1] = ru(cd(k, 128), 4), cs[0] = cd(k, 128), cs[1] = ru(cd(m, 128), 4);
        break;
    case OPAQ_MXFP4:
        packed = ru(cd(k, 2), 16);
        /* fallthrough */
    case OPAQ_MXFP8:
        rs[0] = ru(m, 128), rs[1] = ru(cd(k, 32), 4), cs[0] = ru(cd(m, 32), 4), cs[1] = ru(k, 128);
        break;
    case OPAQ_NVFP4:
        packed = ru(cd(k, 2), 8);
        rs[0] = ru(m, 128), rs[1] = ru(cd(k, 16), 4), cs[0] = ru(k, 128), cs[1] = ru(cd(m, 16), 4);
        break;
    }
    e[0] = leading(names[0], OPAQ_ROWWISE, s->element, shape, rank, packed, 0);
    e[1] = matrix(names[1], OPAQ_ROLE_SCALE, OPAQ_ROWWISE, scale, rs[0], rs[1]);
    e[2] = leading(names[2], OPAQ_COLUMNWISE, s->element, shape, rank, packed, transposed);
    e[3] = matrix(names[3], OPAQ_ROLE_SCALE, OPAQ_COLUMNWISE, scale, cs[0], cs[1]);
    if (s->format != OPAQ_NVFP4) {
        return 4;
    }
    const int rowscaled = (s->options & OPAQ_ROWSCALED) != 0;
    e[2] = matrix(names[2], OPAQ_ROLE_DATA, OPAQ_COLUMNWISE, OPAQ_E2M1, k, ru(cd(m, 2), 8));
    const int global = (s->options & OPAQ_GLOBAL) != 0;
    e[4] =
        vector(global ? "_global_rowwise" : "_amax_rowwise", OPAQ_ROLE_AMAX, OPAQ_ROWWISE, rowscaled ? m : 1);
    e[5] = vector(global ? "_global_columnwise" : "_amax_columnwise", OPAQ_ROLE_AMAX, OPAQ_COLUMNWISE,
                  rowscaled ? k : 1);
    return 6;
}

static const struct {
    int rank;
    int64_t shape[OPAQ_RANK_LIMIT];
} shapes[] = {
    {1, {1}},
    {1, {16}},
    {1, {1000}},
    {1, {0}},
    {2, {1, 1}},
    {2, {128, 128}},
    {2, {129, 31}},
    {2, {31, 257}},
    {2, {0, 7}},
    {2, {7, 0}},
    {2, {0, 0}},
    {2, {1000000, 3}},
    {3, {2, 3, 65}},
    {3, {4, 0, 33}},
    {4, {2, 2, 2, 48}},
    {5, {1, 2, 3, 4, 5}},
    {6, {3, 1, 1, 1, 3, 17}},
    {7, {2, 1, 2, 1, 2, 1, 2}},
    {8, {1, 2, 1, 2, 1, 2, 1, 130}},
    {8, {2, 2, 2, 2, 2, 2, 2, 2}},
};

static void shapes_by_formula(void) {
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    for (int i = 0; i < list.count; ++i) {
        for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; ++k) {
            struct expected_buffer all[6];
            struct expected_buffer present[6];
            int count = 0;
            const int rows = table_of(&list.spec[i], shapes[k].shape, shapes[k].rank, all);
            for (int b = 0; b < rows; ++b) {
                if (all[b].usage & list.spec[i].usage) {
                    present[count++] = all[b];
                }
            }
            const struct opaq_proto proto = make(shapes[k].shape, shapes[k].rank, &list.spec[i]);
            compare(&proto, present, count, spec_text(&list.spec[i]).text);
        }
    }
    printf("  %d specs x %zu shapes\n", list.count, sizeof shapes / sizeof shapes[0]);
    spec_list_free(&list);
}

static void plain_tensors_have_one_buffer(void) {
    static const enum opaq_element dtypes[] = {OPAQ_F16, OPAQ_BF16, OPAQ_F32};
    static const int64_t shape[3] = {2, 3, 4};
    static const int64_t elements[4] = {1, 2, 6, 24}; /* by rank */
    static const int64_t rows[4] = {1, 1, 2, 6};
    for (int i = 0; i < 3 * 4; ++i) {
        const enum opaq_element dtype = dtypes[i / 4];
        const int rank = i % 4;
        struct opaq_proto proto;
        struct opaq_buffer b;
        CHECK_EQ_INT(opaq_proto_make(shape, rank, dtype, NULL, tensor_cpu, &proto, NULL), OPAQ_OK);
        CHECK_EQ_INT(opaq_proto_buffer_count(&proto), 1);
        CHECK_EQ_INT(opaq_proto_buffer(&proto, 0, &b, NULL), OPAQ_OK);
        CHECK_EQ_STR(b.name, "data");
        CHECK_EQ_INT(b.element, dtype);
        CHECK_EQ_INT(b.usage, 0);
        CHECK_EQ_INT(b.rank, rank);
        CHECK_EQ_INT(b.bytes, elements[rank] * entry_bytes_of(dtype));
        CHECK_EQ_INT(opaq_proto_find(&proto, OPAQ_ROLE_DATA, OPAQ_ROWWISE), -1);
        CHECK_EQ_INT(opaq_proto_rows(&proto), rows[rank]);
        CHECK_EQ_INT(opaq_proto_columns(&proto), rank == 0 ? 1 : shape[rank - 1]);
    }
}

static void find_rejects_absent_buffers(void) {
    const int64_t shape[2] = {4, 64};
    const struct opaq_spec spec = spec_of("nvfp4+columnwise");
    const struct opaq_proto proto = make(shape, 2, &spec);
    CHECK_EQ_INT(opaq_proto_find(&proto, OPAQ_ROLE_DATA, OPAQ_ROWWISE), -1);
    CHECK_EQ_INT(opaq_proto_find(&proto, OPAQ_ROLE_AMAX, OPAQ_COLUMNWISE), 2);
    CHECK_EQ_INT(opaq_proto_find(NULL, OPAQ_ROLE_DATA, OPAQ_ROWWISE), -1);
    const struct opaq_spec fp8 = spec_of("fp8+columnwise");
    const struct opaq_proto other = make(shape, 2, &fp8);
    CHECK_EQ_INT(opaq_proto_find(&other, OPAQ_ROLE_SCALE, OPAQ_COLUMNWISE), 1);
    CHECK_EQ_INT(opaq_proto_find(&other, OPAQ_ROLE_SCALE, OPAQ_ROWWISE),
                 -1); /* a shared buffer, absent in this usage */
    CHECK_EQ_INT(opaq_proto_find(&other, OPAQ_ROLE_AMAX, OPAQ_COLUMNWISE), -1);
}

static void update_usage_changes_this_copy_only(void) {
    const int64_t shape[2] = {4, 64};
    const struct opaq_spec *shared = NULL;
    CHECK_EQ_INT(opaq_spec_intern("mxfp8", 5, &shared, NULL), OPAQ_OK);
    struct opaq_proto proto = make(shape, 2, shared);
    const struct opaq_proto before = proto;
    struct opaq_proto copy = proto;
    CHECK_EQ_INT(opaq_proto_update_usage(&copy, OPAQ_BOTH, NULL), OPAQ_OK);
    CHECK_EQ_INT(copy.spec.usage, OPAQ_BOTH);
    CHECK_EQ_INT(opaq_proto_buffer_count(&copy), 4);
    CHECK(opaq_proto_equal(&proto, &before) && !opaq_proto_equal(&proto, &copy));
    CHECK_EQ_INT(shared->usage, OPAQ_ROWWISE);
    struct opaq_error error;
    static const int bad[] = {0, 4, 5, -1, 256 + 1};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
        CHECK_EQ_INT(opaq_proto_update_usage(&proto, bad[i], &error), OPAQ_ERROR_SPEC);
        CHECK(opaq_proto_equal(&proto, &before));
    }
    CHECK_EQ_INT(opaq_proto_update_usage(NULL, OPAQ_BOTH, &error), OPAQ_ERROR_ARGUMENT);
    struct opaq_proto plain = make(shape, 2, NULL);
    CHECK_EQ_INT(opaq_proto_update_usage(&plain, OPAQ_BOTH, &error), OPAQ_ERROR_ARGUMENT);
}

static const struct test_case tests[] = {TEST(shapes_as_numbers), TEST(shapes_by_formula),
                                         TEST(plain_tensors_have_one_buffer), TEST(find_rejects_absent_buffers),
                                         TEST(update_usage_changes_this_copy_only)};
TEST_MAIN(tests)
