/* test_quant_errors.c: operations with invalid arguments. Each error has its status, names the operation and
 * the numbers, writes only the error, and works with the error argument NULL. */
#include <stdlib.h>
#include <time.h>

#include "check.h"
#include "support_quant.h"
#include "support_spec.h"

/* Whether a refused call left its outputs unchanged. */
static int is_untouched(const struct tensor *owner) {
    for (int i = 0; i < opaq_proto_buffer_count(&owner->view.proto); ++i) {
        const uint8_t *bytes = owner->view.buffer[i].data;
        for (size_t k = 0; k < owner->view.buffer[i].bytes; ++k) {
            if (bytes[k] != 0xA5) {
                return 0;
            }
        }
    }
    return 1;
}

static void check_refusal(enum opaq_status status, enum opaq_status expected, const struct opaq_error *error,
                          const char *operation, const char *says, const char *what) {
    if (status != expected || error->status != expected ||
        strncmp(error->text, operation, strlen(operation)) != 0 || strstr(error->text, says) == NULL) {
        CHECK_FAIL("%s: %s, expected %s from \"%s\" with \"%s\": %s", what, opaq_status_name(status),
                   opaq_status_name(expected), operation, says, error->text);
    }
}

/* ---- quantize ---- */

static void quantize_refuses(const char *what, const struct opaq_view *x, const struct opaq_quantize_args *args,
                             const struct opaq_view *out, const struct tensor *owner, enum opaq_status expected,
                             const char *says) {
    struct opaq_error error = {OPAQ_OK, ""};
    check_refusal(opaq_quantize(x, args, NULL, out, &error), expected, &error, "quantize: ", says, what);
    CHECK_EQ_INT(opaq_quantize(x, args, NULL, out, NULL), expected);
    if (owner != NULL && !is_untouched(owner)) {
        CHECK_FAIL("%s: the output was written to", what);
    }
}

static void quantize_tensors(void) {
    struct tensor x = tensor_make(20, 40, OPAQ_F32, NULL);
    struct tensor q = tensor_make(20, 40, OPAQ_F32, "nvfp4+both");
    struct tensor wide = tensor_make(20, 41, OPAQ_F32, NULL);
    const int64_t flat[3] = {20, 40, 1};
    tensor_fill(&x, FILL_NORMAL, 1);
    quantize_refuses("x NULL", NULL, NULL, &q.view, &q, OPAQ_ERROR_ARGUMENT, "x is NULL");
    quantize_refuses("out NULL", &x.view, NULL, NULL, &q, OPAQ_ERROR_ARGUMENT, "out is NULL");
    quantize_refuses("x quantized", &q.view, NULL, &q.view, &q, OPAQ_ERROR_ARGUMENT, "x is a quantized tensor");
    quantize_refuses("out plain", &x.view, NULL, &x.view, &q, OPAQ_ERROR_ARGUMENT, "out is a plain tensor");
    quantize_refuses("columns", &wide.view, NULL, &q.view, &q, OPAQ_ERROR_SHAPE,
                     "f32[20,41] cpu and f32[20,40] nvfp4+both cpu");
    struct opaq_view view = x.view;
    view.proto.rank = 3;
    memcpy(view.proto.shape, flat, sizeof flat);
    view.row_stride = 1;
    quantize_refuses("rank", &view, NULL, &q.view, &q, OPAQ_ERROR_SHAPE, "f32[20,40,1]");
    view = x.view;
    view.proto.device = (struct opaq_device){OPAQ_DEVICE_CUDA, 2};
    quantize_refuses("x on a device", &view, NULL, &q.view, &q, OPAQ_ERROR_ARGUMENT, "on cuda:2 and");
    view = q.view;
    view.proto.device = (struct opaq_device){OPAQ_DEVICE_CUDA, 3};
    quantize_refuses("out on a device", &x.view, NULL, &view, &q, OPAQ_ERROR_ARGUMENT, "on cuda:3, expected");
    view = q.view;
    view.proto.spec.options = OPAQ_DELAYED;
    quantize_refuses("a bad spec", &x.view, NULL, &view, &q, OPAQ_ERROR_SPEC, "delayed");
    view = q.view;
    view.proto.rank = 9;
    quantize_refuses("a bad rank", &x.view, NULL, &view, &q, OPAQ_ERROR_SHAPE, "rank is 9");
    view = x.view;
    view.proto.shape[0] = -1;
    quantize_refuses("a negative size", &view, NULL, &q.view, &q, OPAQ_ERROR_SHAPE, "dimension 0 is -1");
    tensor_free(&wide);
    tensor_free(&q);
    tensor_free(&x);
}

static void quantize_buffers(void) {
    struct tensor x = tensor_make(20, 40, OPAQ_F32, NULL);
    struct tensor q = tensor_make(20, 40, OPAQ_F32, "nvfp4+both");
    tensor_fill(&x, FILL_NORMAL, 1);
    struct opaq_view view = x.view;
    view.buffer[0].bytes = 3199;
    quantize_refuses("x short", &view, NULL, &q.view, &q, OPAQ_ERROR_BUFFER, "3200 bytes, the buffer has 3199");
    view = x.view;
    view.buffer[0].data = NULL;
    quantize_refuses("x without data", &view, NULL, &q.view, &q, OPAQ_ERROR_BUFFER, "NULL");
    view = x.view;
    view.row_stride = 39;
    quantize_refuses("x overlapping itself", &view, NULL, &q.view, &q, OPAQ_ERROR_BUFFER, "39");
    view.row_stride = -40;
    quantize_refuses("x backwards", &view, NULL, &q.view, &q, OPAQ_ERROR_BUFFER, "-40");
    view.row_stride = INT64_MAX;
    quantize_refuses("x far apart", &view, NULL, &q.view, &q, OPAQ_ERROR_OVERFLOW, "2^62");
    view.row_stride = 41;
    quantize_refuses("x short by its stride", &view, NULL, &q.view, &q, OPAQ_ERROR_BUFFER, "3276");
    for (int i = 0; i < opaq_proto_buffer_count(&q.view.proto); ++i) {
        struct opaq_buffer buffer;
        (void)opaq_proto_buffer(&q.view.proto, i, &buffer, NULL);
        view = q.view;
        view.buffer[i].data = NULL;
        quantize_refuses("a buffer NULL", &x.view, NULL, &view, &q, OPAQ_ERROR_BUFFER, buffer.name);
        view = q.view;
        view.buffer[i].bytes = 0;
        quantize_refuses("a buffer empty", &x.view, NULL, &view, &q, OPAQ_ERROR_BUFFER, "it has 0");
    }
    tensor_free(&q);
    tensor_free(&x);
}

/* One block of memory in which x and the buffers of out are placed so that they are adjacent or overlap by a
 * byte. */
static void quantize_overlap(void) {
    struct tensor x = tensor_make(8, 64, OPAQ_F32, NULL);
    struct tensor q = tensor_make(8, 64, OPAQ_F32, "fp8");
    uint8_t *block = calloc(8192, 1);
    struct opaq_view in = x.view;
    struct opaq_view out = q.view;
    if (block == NULL) {
        exit(1);
    }
    in.buffer[0] = (struct opaq_span){block + 4096, 2048};
    out.buffer[0] = (struct opaq_span){block + 4096 - 512, 512};
    CHECK_EQ_INT(opaq_quantize(&in, NULL, NULL, &out, NULL), OPAQ_OK); /* adjacent */
    out.buffer[0].data = block + 4096 + 2048;
    CHECK_EQ_INT(opaq_quantize(&in, NULL, NULL, &out, NULL), OPAQ_OK);
    out.buffer[0].data = block + 4096 - 511;
    quantize_refuses("the first byte", &in, NULL, &out, NULL, OPAQ_ERROR_BUFFER, "\"_data\" overlaps");
    out.buffer[0].data = block + 4096 + 2047;
    quantize_refuses("the last byte", &in, NULL, &out, NULL, OPAQ_ERROR_BUFFER, "\"_data\" overlaps");
    out.buffer[0] = q.view.buffer[0];
    out.buffer[1] = (struct opaq_span){block + 4096 + 400, 4};
    quantize_refuses("the scale", &in, NULL, &out, NULL, OPAQ_ERROR_BUFFER, "\"_scale_inv\" overlaps");
    out = q.view;
    in.row_stride = 128; /* the gap between the rows of x is within its extent */
    in.buffer[0].bytes = (7 * 128 + 64) * 4;
    in.buffer[0].data = block;
    out.buffer[1].data = block + 64 * 4;
    quantize_refuses("in a gap", &in, NULL, &out, NULL, OPAQ_ERROR_BUFFER, "overlaps");
    struct opaq_error error;
    check_refusal(opaq_dequantize(&out, 0, NULL, &in, &error), OPAQ_ERROR_BUFFER, &error,
                  "dequantize: ", "overlaps", "dequantize over itself");
    free(block);
    tensor_free(&q);
    tensor_free(&x);
}

static void quantize_args(void) {
    static const char *const specs[] = {"fp8",     "fp8+delayed", "fp8row", "fp8blk1",
                                        "fp8blk2", "mxfp8",       "mxfp4",  "nvfp4"};
    const float number = 2.0f;
    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; ++i) {
        const int is_fp8 = i < 2;
        const int is_delayed = i == 1;
        const int takes_amax = i == 0 || i == 7;
        struct tensor x = tensor_make(20, 40, OPAQ_F32, NULL);
        struct tensor q = tensor_make(20, 40, OPAQ_F32, specs[i]);
        tensor_fill(&x, FILL_NORMAL, 1);
        float returned = 123.0f;
        const float *needed = is_delayed ? &number : NULL;
        struct opaq_quantize_args args = {.scale = is_delayed ? NULL : &number,
                                          .amax = is_fp8 ? &returned : NULL};
        quantize_refuses(specs[i], &x.view, &args, &q.view, &q, OPAQ_ERROR_ARGUMENT,
                         is_delayed ? "args.scale is NULL, but the spec is delayed" : "not delayed");
        args = (struct opaq_quantize_args){.scale = needed, .amax_rowwise = &number};
        if (!takes_amax) {
            quantize_refuses(specs[i], &x.view, &args, &q.view, &q, OPAQ_ERROR_ARGUMENT, "amax is given");
            args = (struct opaq_quantize_args){.scale = needed, .amax_columnwise = &number};
            quantize_refuses(specs[i], &x.view, &args, &q.view, &q, OPAQ_ERROR_ARGUMENT, "amax is given");
        }
        if (takes_amax) { /* the quantizer is rowwise */
            args = (struct opaq_quantize_args){.amax_columnwise = &number};
            quantize_refuses(specs[i], &x.view, &args, &q.view, &q, OPAQ_ERROR_ARGUMENT,
                             "amax_columnwise is given");
        }
        if (!is_fp8) {
            args = (struct opaq_quantize_args){.amax = &returned};
            quantize_refuses(specs[i], &x.view, &args, &q.view, &q, OPAQ_ERROR_ARGUMENT, "args.amax");
        }
        args = (struct opaq_quantize_args){.scale = needed, .random = {1, (uint64_t)1 << 63}};
        quantize_refuses(specs[i], &x.view, &args, &q.view, &q, OPAQ_ERROR_ARGUMENT, "9223372036854775808");
        CHECK(returned == 123.0f);
        args.random.offset = ((uint64_t)1 << 63) - 1;
        CHECK_EQ_INT(opaq_quantize(&x.view, &args, NULL, &q.view, NULL), OPAQ_OK);
        tensor_free(&q);
        tensor_free(&x);
    }
}

/* ---- dequantize ---- */

static void dequantize_refuses(const char *what, const struct opaq_view *q, int usage,
                               const struct opaq_view *y, const struct tensor *owner, enum opaq_status expected,
                               const char *says) {
    struct opaq_error error = {OPAQ_OK, ""};
    check_refusal(opaq_dequantize(q, usage, NULL, y, &error), expected, &error, "dequantize: ", says, what);
    CHECK_EQ_INT(opaq_dequantize(q, usage, NULL, y, NULL), expected);
    if (!is_untouched(owner)) {
        CHECK_FAIL("%s: the output was written to", what);
    }
}

static void dequantize_arguments(void) {
    struct tensor x = tensor_make(20, 40, OPAQ_F32, NULL);
    struct tensor y = tensor_make(20, 40, OPAQ_BF16, NULL);
    struct tensor narrow = tensor_make(19, 40, OPAQ_F32, NULL);
    tensor_fill(&x, FILL_NORMAL, 1);
    static const char *const specs[] = {"mxfp8", "mxfp8+columnwise", "mxfp8+both"};
    for (int i = 0; i < 3; ++i) {
        const struct opaq_spec spec = spec_of(specs[i]);
        struct tensor q = quantized(&x, &spec, NULL);
        static const int usages[] = {-1, 1, 2, 3, 4, 5, 256 + 1, INT32_MIN};
        for (size_t k = 0; k < sizeof usages / sizeof usages[0]; ++k) {
            const int present = (usages[k] == 1 || usages[k] == 2) && (usages[k] & spec.usage);
            char number[32];
            (void)snprintf(number, sizeof number, "usage is %d", usages[k]);
            if (!present) {
                dequantize_refuses(specs[i], &q.view, usages[k], &y.view, &y, OPAQ_ERROR_ARGUMENT, number);
            }
        }
        dequantize_refuses("q NULL", NULL, 0, &y.view, &y, OPAQ_ERROR_ARGUMENT, "q is NULL");
        dequantize_refuses("y NULL", &q.view, 0, NULL, &y, OPAQ_ERROR_ARGUMENT, "y is NULL");
        dequantize_refuses("q plain", &x.view, 0, &y.view, &y, OPAQ_ERROR_ARGUMENT, "q is a plain tensor");
        dequantize_refuses("y quantized", &q.view, 0, &q.view, &y, OPAQ_ERROR_ARGUMENT,
                           "y is a quantized tensor");
        dequantize_refuses("shapes", &q.view, 0, &narrow.view, &narrow, OPAQ_ERROR_SHAPE, "[19,40]");
        struct opaq_view view = y.view;
        view.buffer[0].bytes = 1599;
        dequantize_refuses("y short", &q.view, 0, &view, &y, OPAQ_ERROR_BUFFER,
                           "1600 bytes, the buffer has 1599");
        view = y.view;
        view.proto.device.type = OPAQ_DEVICE_CUDA;
        dequantize_refuses("y on a device", &q.view, 0, &view, &y, OPAQ_ERROR_ARGUMENT, "cuda:0");
        view = q.view;
        view.buffer[1].bytes = 1;
        dequantize_refuses("q short", &view, 0, &y.view, &y, OPAQ_ERROR_BUFFER, "scale_inv");
        tensor_free(&q);
    }
    tensor_free(&narrow);
    tensor_free(&y);
    tensor_free(&x);
}

/* ---- amax ---- */

static void amax_refuses(const char *what, const struct opaq_view *x, const char *text, int usage,
                         int64_t count, int has_room, enum opaq_status expected, const char *says) {
    float room[64];
    struct opaq_error error = {OPAQ_OK, ""};
    struct opaq_spec spec;
    for (int i = 0; i < 64; ++i) {
        room[i] = -7.0f;
    }
    if (text != NULL) {
        spec = spec_of(text);
    }
    const struct opaq_spec *given = text == NULL ? NULL : &spec;
    float *amax = has_room ? room : NULL;
    check_refusal(opaq_amax(x, given, (enum opaq_usage)usage, NULL, amax, count, &error), expected, &error,
                  "amax: ", says, what);
    CHECK_EQ_INT(opaq_amax(x, given, (enum opaq_usage)usage, NULL, amax, count, NULL), expected);
    for (int i = 0; i < 64; ++i) {
        CHECK(room[i] == -7.0f);
    }
}

static void amax_arguments(void) {
    struct tensor x = tensor_make(20, 40, OPAQ_F32, NULL);
    struct tensor q = tensor_make(20, 40, OPAQ_F32, "fp8");
    tensor_fill(&x, FILL_NORMAL, 1);
    amax_refuses("x NULL", NULL, "nvfp4", 1, 1, 1, OPAQ_ERROR_ARGUMENT, "x is NULL");
    amax_refuses("x quantized", &q.view, "nvfp4", 1, 1, 1, OPAQ_ERROR_ARGUMENT, "x is a quantized tensor");
    amax_refuses("spec NULL", &x.view, NULL, 1, 1, 1, OPAQ_ERROR_ARGUMENT, "spec is NULL");
    amax_refuses("usage 0", &x.view, "nvfp4+both", 0, 1, 1, OPAQ_ERROR_ARGUMENT, "usage is 0");
    amax_refuses("usage both", &x.view, "nvfp4+both", 3, 1, 1, OPAQ_ERROR_ARGUMENT, "usage is 3");
    amax_refuses("no room", &x.view, "nvfp4", 1, 1, 0, OPAQ_ERROR_BUFFER, "NULL");
    amax_refuses("too much room", &x.view, "nvfp4", 1, 2, 1, OPAQ_ERROR_BUFFER, "2 floats");
    amax_refuses("negative room", &x.view, "nvfp4", 1, -1, 1, OPAQ_ERROR_BUFFER, "-1 floats");
    amax_refuses("rows", &x.view, "nvfp4+both+rowscaled", 1, 40, 1, OPAQ_ERROR_BUFFER, "20");
    amax_refuses("global", &x.view, "nvfp4+global+rule=modelopt", 1, 1, 1, OPAQ_ERROR_ARGUMENT, "global");
    amax_refuses("columns", &x.view, "nvfp4+both+rowscaled", 2, 20, 1, OPAQ_ERROR_BUFFER, "40");
    amax_refuses("a usage that is not there", &x.view, "nvfp4", 2, 1, 1, OPAQ_ERROR_BUFFER, "0");
    amax_refuses("a format without", &x.view, "mxfp8", 1, 1, 1, OPAQ_ERROR_BUFFER, "mxfp8");
    amax_refuses("a format without", &x.view, "mxfp8", 1, 0, 1, OPAQ_ERROR_BUFFER, "mxfp8");
    amax_refuses("a format without", &x.view, "fp8row", 1, 20, 1, OPAQ_ERROR_BUFFER, "fp8row");
    amax_refuses("delayed", &x.view, "fp8+delayed", 1, 1, 1, OPAQ_ERROR_BUFFER, "fp8");
    struct opaq_spec bad = spec_of("nvfp4");
    struct opaq_error error = {OPAQ_OK, ""};
    float amax = -7.0f;
    bad.usage = 0;
    check_refusal(opaq_amax(&x.view, &bad, OPAQ_ROWWISE, NULL, &amax, 1, &error), OPAQ_ERROR_SPEC, &error,
                  "amax: ", "usage is 0", "a bad spec");
    struct opaq_view scalar = x.view;
    scalar.proto.rank = 0;
    scalar.proto.shape[0] = scalar.proto.shape[1] = 0;
    bad = spec_of("nvfp4");
    check_refusal(opaq_amax(&scalar, &bad, OPAQ_ROWWISE, NULL, &amax, 1, &error), OPAQ_ERROR_SHAPE, &error,
                  "amax: ", "rank is 0", "a scalar");
    CHECK(amax == -7.0f);
    tensor_free(&q);
    tensor_free(&x);
}

static void amax_counts(void) {
    static const struct {
        const char *spec;
        int64_t rowwise;
        int64_t columnwise;
    } cases[] = {{"fp8+both", 1, 1},
                 {"fp8", 1, 0},
                 {"fp8+both+delayed", 0, 0},
                 {"fp8row+both", 0, 0},
                 {"mxfp8+both", 0, 0},
                 {"nvfp4", 1, 0},
                 {"nvfp4+both", 1, 1},
                 {"nvfp4+columnwise", 0, 1},
                 {"mxfp4", 0, 0},
                 {"fp8blk2", 0, 0},
                 {"nvfp4+both+rowscaled", 20, 40}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        struct tensor q = tensor_make(20, 40, OPAQ_F32, cases[i].spec);
        CHECK_EQ_INT(opaq_amax_count(&q.view.proto, OPAQ_ROWWISE), cases[i].rowwise);
        CHECK_EQ_INT(opaq_amax_count(&q.view.proto, OPAQ_COLUMNWISE), cases[i].columnwise);
        tensor_free(&q);
    }
    struct tensor x = tensor_make(20, 40, OPAQ_F32, NULL);
    CHECK_EQ_INT(opaq_amax_count(&x.view.proto, OPAQ_ROWWISE), 0);
    CHECK_EQ_INT(opaq_amax_count(NULL, OPAQ_ROWWISE), 0);
    tensor_free(&x);
}

/* ---- delayed_update ---- */

static void delayed_arguments(void) {
    float history[6] = {1, 2, 3, 4, 5, 6};
    const float before[6] = {1, 2, 3, 4, 5, 6};
    float scale[2] = {7, 8};
    struct opaq_error error = {OPAQ_OK, ""};
    const struct opaq_delayed_state good = {history, scale, 3, 2};
    static const struct {
        int64_t length;
        int64_t count;
        const char *says;
    } shapes[] = {
        {0, 2, "[0][2]"}, {-3, 2, "[-3][2]"}, {3, -1, "[3][-1]"}, {(int64_t)1 << 32, (int64_t)1 << 32, "["}};
    check_refusal(opaq_delayed_update(NULL, NULL, OPAQ_E4M3, 0, OPAQ_AMAX_MAX, NULL, &error),
                  OPAQ_ERROR_ARGUMENT, &error, "delayed_update: ", "NULL", "no state");
    for (int i = 0; i < 4; ++i) {
        const struct opaq_delayed_state bad = {history, scale, shapes[i].length, shapes[i].count};
        check_refusal(opaq_delayed_update(&bad, NULL, OPAQ_E4M3, 0, OPAQ_AMAX_MAX, NULL, &error),
                      OPAQ_ERROR_SHAPE, &error, "delayed_update: ", shapes[i].says, "shape");
        CHECK_EQ_INT(opaq_delayed_update(&bad, NULL, OPAQ_E4M3, 0, OPAQ_AMAX_MAX, NULL, NULL),
                     OPAQ_ERROR_SHAPE);
    }
    const struct opaq_delayed_state no_history = {NULL, scale, 3, 2};
    const struct opaq_delayed_state no_scale = {history, NULL, 3, 2};
    check_refusal(opaq_delayed_update(&no_history, NULL, OPAQ_E4M3, 0, OPAQ_AMAX_MAX, NULL, &error),
                  OPAQ_ERROR_BUFFER, &error, "delayed_update: ", "amax_history", "no history");
    check_refusal(opaq_delayed_update(&no_scale, NULL, OPAQ_E4M3, 0, OPAQ_AMAX_MAX, NULL, &error),
                  OPAQ_ERROR_BUFFER, &error, "delayed_update: ", "scale", "no scale");
    for (int element = -1; element <= OPAQ_ELEMENT_COUNT; ++element) {
        if (element != OPAQ_E4M3 && element != OPAQ_E5M2) {
            check_refusal(
                opaq_delayed_update(&good, NULL, (enum opaq_element)element, 0, OPAQ_AMAX_MAX, NULL, &error),
                OPAQ_ERROR_ARGUMENT, &error, "delayed_update: ", "element is", "element");
        }
    }
    static const int margins[] = {65, -65, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 4; ++i) {
        check_refusal(opaq_delayed_update(&good, NULL, OPAQ_E4M3, margins[i], OPAQ_AMAX_MAX, NULL, &error),
                      OPAQ_ERROR_ARGUMENT, &error, "delayed_update: ", "margin is", "margin");
    }
    check_refusal(opaq_delayed_update(&good, NULL, OPAQ_E4M3, 0, (enum opaq_amax_algorithm)2, NULL, &error),
                  OPAQ_ERROR_ARGUMENT, &error, "delayed_update: ", "algorithm is 2", "algorithm");
    CHECK_BYTES(history, before, sizeof history, "history after errors");
    CHECK(scale[0] == 7.0f && scale[1] == 8.0f);
    const struct opaq_delayed_state none = {NULL, NULL, 1, 0};
    CHECK_EQ_INT(opaq_delayed_update(&none, NULL, OPAQ_E4M3, 0, OPAQ_AMAX_MAX, NULL, &error), OPAQ_OK);
}

/* ---- calls that succeed ---- */

static void success_does_not_touch_the_error(void) {
    struct tensor x = tensor_make(20, 40, OPAQ_F32, NULL);
    struct tensor q = tensor_make(20, 40, OPAQ_F32, "nvfp4+both");
    struct opaq_error error;
    struct opaq_error before;
    tensor_fill(&x, FILL_NORMAL, 1);
    memset(&error, 0x5A, sizeof error);
    memset(&before, 0x5A, sizeof before);
    CHECK_EQ_INT(opaq_quantize(&x.view, NULL, NULL, &q.view, &error), OPAQ_OK);
    CHECK_EQ_INT(opaq_dequantize(&q.view, 0, NULL, &x.view, &error), OPAQ_OK);
    CHECK_BYTES(&error, &before, sizeof error, "the error after success");
    tensor_free(&q);
    tensor_free(&x);
}

/* Empty tensors are valid for every spec; their pointers may be NULL. */
static void empty_tensors(void) {
    static const int64_t sizes[][2] = {{0, 0}, {0, 5}, {5, 0}};
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    for (int i = 0; i < list.count * 3; ++i) {
        struct tensor x = tensor_make(sizes[i % 3][0], sizes[i % 3][1], OPAQ_F32, NULL);
        struct tensor q = quantized_like(&x, &list.spec[i / 3]);
        struct tensor y = plain_like(&q);
        const struct opaq_quantize_args args = args_for(&list.spec[i / 3]);
        struct opaq_view in = x.view;
        struct opaq_view out = q.view;
        struct opaq_error error = {OPAQ_OK, ""};
        in.buffer[0] = (struct opaq_span){NULL, 0};
        for (int k = 0; k < opaq_proto_buffer_count(&q.view.proto); ++k) {
            out.buffer[k].data = out.buffer[k].bytes == 0 ? NULL : out.buffer[k].data;
        }
        if (opaq_quantize(&in, &args, NULL, &out, &error) != OPAQ_OK ||
            opaq_dequantize(&out, 0, NULL, &y.view, &error) != OPAQ_OK) {
            CHECK_FAIL("%s: %s", spec_text(&list.spec[i / 3]).text, error.text);
        }
        tensor_free(&y);
        tensor_free(&q);
        tensor_free(&x);
    }
    spec_list_free(&list);
}

/* Without elements the work is constant for any other dimension: 2^31 empty rows take no seconds. */
static void empty_tensors_take_no_time(void) {
    static const char *const specs[] = {"fp8", "mxfp4+columnwise", "nvfp4"};
    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; ++i) {
        const int flip = i == 1;
        const int64_t shape[2] = {flip ? 0 : (int64_t)1 << 31, flip ? (int64_t)1 << 31 : 0};
        const struct opaq_spec spec = spec_of(specs[i]);
        struct opaq_proto proto;
        struct opaq_view in;
        struct opaq_view out;
        float scale = 0.0f;
        CHECK_EQ_INT(opaq_view_plain(shape, NULL, 2, OPAQ_F32, tensor_cpu, NULL, 0, &in, NULL), OPAQ_OK);
        CHECK_EQ_INT(opaq_proto_make(shape, 2, OPAQ_F32, &spec, tensor_cpu, &proto, NULL), OPAQ_OK);
        memset(&out, 0, sizeof out);
        out.proto = proto;
        for (int k = 0; k < opaq_proto_buffer_count(&proto); ++k) {
            struct opaq_buffer buffer;
            CHECK_EQ_INT(opaq_proto_buffer(&proto, k, &buffer, NULL), OPAQ_OK);
            CHECK(buffer.bytes == 0 || buffer.bytes == sizeof scale);
            out.buffer[k] = (struct opaq_span){buffer.bytes > 0 ? &scale : NULL, buffer.bytes};
        }
        const clock_t start = clock();
        CHECK_EQ_INT(opaq_quantize(&in, NULL, NULL, &out, NULL), OPAQ_OK);
        CHECK_EQ_INT(opaq_dequantize(&out, 0, NULL, &in, NULL), OPAQ_OK);
        const double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
        if (seconds > 1.0) {
            CHECK_FAIL("%s: an empty tensor took %.1f s", specs[i], seconds);
        }
    }
}

/* The amax of an empty tensor is 0, and so is that of an empty list: both occur in reductions over ranks. */
static void amax_of_empty_tensors(void) {
    struct tensor x = tensor_make(0, 5, OPAQ_F32, NULL);
    const struct opaq_spec one = spec_of("nvfp4+both");
    const struct opaq_spec many = spec_of("nvfp4+both+rowscaled");
    float amax[5] = {9, 9, 9, 9, 9};
    struct opaq_error error = {OPAQ_OK, ""};
    CHECK_EQ_INT(opaq_amax(&x.view, &one, OPAQ_ROWWISE, NULL, amax, 1, &error), OPAQ_OK);
    CHECK(amax[0] == 0.0f);
    CHECK_EQ_INT(opaq_amax(&x.view, &many, OPAQ_COLUMNWISE, NULL, amax, 5, &error), OPAQ_OK);
    CHECK(amax[0] == 0.0f && amax[4] == 0.0f);
    const int64_t none = opaq_amax_count(
        &(struct opaq_proto){.rank = 2, .dtype = OPAQ_F32, .is_quantized = 1, .shape = {0, 5}, .spec = many},
        OPAQ_ROWWISE);
    CHECK_EQ_INT(none, 0);
    if (opaq_amax(&x.view, &many, OPAQ_ROWWISE, NULL, amax, none, &error) != OPAQ_OK) {
        CHECK_FAIL("opaq_amax refuses the 0 floats that opaq_amax_count returns: %s", error.text);
    }
    tensor_free(&x);
}

static const struct test_case tests[] = {
    TEST(quantize_tensors), TEST(quantize_buffers),           TEST(quantize_overlap),
    TEST(quantize_args),    TEST(dequantize_arguments),       TEST(amax_arguments),
    TEST(amax_counts),      TEST(delayed_arguments),          TEST(success_does_not_touch_the_error),
    TEST(empty_tensors),    TEST(empty_tensors_take_no_time), TEST(amax_of_empty_tensors)};
TEST_MAIN(tests)
