/* test_spec_query.c: the properties of a spec for callers that slice, tile or send tensors, and the specs
 * derived from one. */
#include "check.h"
#include "support_spec.h"

struct answers {
    const char *text;
    int delayed, stochastic, tiled, plain, tileable, amaxes, covers, rows, row_scales, gives_amax;
};

static const struct answers cases[] = {
    {"fp8", 0, 0, 0, 1, 1, OPAQ_ROWWISE, 0, 1, 0, 1},
    {"fp8+both", 0, 0, 0, 0, 1, OPAQ_BOTH, 0, 1, 0, 1},
    {"fp8.e5m2+delayed", 1, 0, 0, 1, 1, 0, 0, 1, 0, 1},
    {"fp8row", 0, 0, 0, 1, 1, 0, 0, 1, 1, 0},
    {"fp8row+columnwise", 0, 0, 0, 0, 1, 0, 1, 1, 1, 0},
    {"fp8blk1+pow2", 0, 0, 0, 1, 0, 0, 0, 1, 0, 0},
    {"fp8blk1+both", 0, 0, 0, 0, 0, 0, 0, 128, 0, 0},
    {"fp8blk2", 0, 0, 0, 1, 1, 0, 0, 128, 0, 0},
    {"mxfp8+sr", 0, 1, 0, 1, 1, 0, 0, 1, 0, 0},
    {"mxfp8+2d", 0, 0, 0, 1, 1, 0, 0, 32, 0, 0},
    {"mxfp4+swizzle", 0, 0, 0, 0, 1, 0, 0, 1, 0, 0},
    {"mxfp4+tiled", 0, 0, 1, 0, 1, 0, 0, 1, 0, 0},
    {"nvfp4+columnwise", 0, 0, 0, 0, 1, OPAQ_COLUMNWISE, 0, 16, 0, 0},
    {"nvfp4+rowscaled+both", 0, 0, 0, 0, 1, 0, 1, 16, 0, 0},
    {"nvfp4+rht+sr+both", 0, 1, 0, 0, 0, OPAQ_BOTH, 0, 16, 0, 0},
};

static void properties(void) {
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        const struct answers *one = &cases[i];
        const struct opaq_spec spec = spec_of(one->text);
        const int expected[] = {one->delayed, one->stochastic, one->tiled, one->plain,      one->tileable,
                                one->amaxes,  one->covers,     one->rows,  one->row_scales, one->gives_amax};
        for (int p = 0; p < (int)(sizeof expected / sizeof expected[0]); ++p) {
            const int64_t found = opaq_spec_query(&spec, (enum opaq_spec_property)p);
            if (found != expected[p]) {
                CHECK_FAIL("%s: property %d is %d, expected %d", one->text, p, (int)found, expected[p]);
            }
        }
    }
}

static void unknown_queries(void) {
    struct opaq_spec spec = spec_of("fp8");
    CHECK_EQ_INT(opaq_spec_query(NULL, OPAQ_SPEC_IS_DELAYED), -1);
    CHECK_EQ_INT(opaq_spec_query(&spec, (enum opaq_spec_property)99), -1);
    spec.usage = 0;
    CHECK_EQ_INT(opaq_spec_query(&spec, OPAQ_SPEC_IS_DELAYED), -1);
}

static void derivations(void) {
    static const struct {
        const char *from;
        enum opaq_derivation how;
        const char *made; /* NULL: an error */
    } all[] = {
        {"nvfp4+both+swizzle", OPAQ_DERIVE_TILED, "nvfp4+tiled"},
        {"fp8blk1", OPAQ_DERIVE_TILED, NULL},
        {"nvfp4+rht", OPAQ_DERIVE_TILED, NULL},
        {"nvfp4+tiled", OPAQ_DERIVE_UNTILED, "nvfp4"},
        {"mxfp8", OPAQ_DERIVE_UNTILED, "mxfp8"},
        {"fp8.e5m2+delayed", OPAQ_DERIVE_CURRENT, "fp8.e5m2"},
        {"fp8blk1+pow2+eps=5e-1", OPAQ_DERIVE_HANDED_ON, "fp8blk1+pow2+eps=5e-1"},
        {"nvfp4+rht+sr", OPAQ_DERIVE_HANDED_ON, "nvfp4"},
        {"nvfp4+4over6=mse+e4m3max=448", OPAQ_DERIVE_HANDED_ON, "nvfp4"},
        {"nvfp4+4over6+rowscaled", OPAQ_DERIVE_HANDED_ON, "nvfp4"},
        {"mxfp8.e5m2+2d", OPAQ_DERIVE_HANDED_ON, "mxfp8.e5m2"},
        {"fp8", OPAQ_DERIVE_ROW_AMAXES, "fp8row"},
        {"fp8+rule=modelopt", OPAQ_DERIVE_ROW_AMAXES, "fp8row+rule=modelopt"},
        {"fp8+delayed", OPAQ_DERIVE_ROW_AMAXES, "fp8+delayed"},
        {"nvfp4", OPAQ_DERIVE_ROW_AMAXES, "nvfp4+rowscaled"},
        {"mxfp8", OPAQ_DERIVE_ROW_AMAXES, "mxfp8"},
        {"fp8", (enum opaq_derivation)99, NULL},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) {
        const struct opaq_spec spec = spec_of(all[i].from);
        struct opaq_spec made = spec_of("fp8row");
        struct opaq_error error = {OPAQ_OK, ""};
        const enum opaq_status status = opaq_spec_derive(&spec, all[i].how, &made, &error);
        CHECK_EQ_STR(spec_text(&made).text, all[i].made == NULL ? "fp8row" : all[i].made);
        CHECK((status == OPAQ_OK) == (all[i].made != NULL) && (status == OPAQ_OK) == (error.text[0] == '\0'));
    }
    const struct opaq_spec spec = spec_of("fp8");
    CHECK_EQ_INT(opaq_spec_derive(&spec, OPAQ_DERIVE_TILED, NULL, NULL), OPAQ_ERROR_ARGUMENT);
    CHECK(opaq_spec_derive(NULL, OPAQ_DERIVE_TILED, NULL, NULL) != OPAQ_OK);
}

static const struct test_case tests[] = {TEST(properties), TEST(unknown_queries), TEST(derivations)};
TEST_MAIN(tests)
