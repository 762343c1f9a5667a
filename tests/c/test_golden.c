/* test_golden.c: the bytes of every format against vectors that NumPy and ml_dtypes computed from the
 * documentation (tests/golden), on one thread, on several, and on the test device (support_hiding.h). */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "support_golden.h"
#include "support_hiding.h"
#include "support_tensor.h"

static struct opaq_view input_view(const struct golden_input *input) {
    const int64_t shape[2] = {input->rows, input->columns};
    const int64_t strides[2] = {input->row_stride, 1};
    struct opaq_view view;
    struct opaq_error error;
    memset(&view, 0, sizeof view);
    /* the file is packed, so buffers that may be misaligned are copied */
    void *data = malloc(input->data.bytes + 1);
    if (data == NULL) {
        exit(1);
    }
    memcpy(data, input->data.data, input->data.bytes);
    if (opaq_view_plain(shape, strides, 2, input->dtype, tensor_cpu, data, input->data.bytes, &view, &error) !=
        OPAQ_OK) {
        CHECK_FAIL("input: %s", error.text);
    }
    return view;
}

/* `hiding`: where the tensor's memory is if it is on the test device, or NULL. */
static void check_buffers(const struct golden_record *record, const struct tensor *q,
                          const struct hiding *hiding, const char *how) {
    CHECK_EQ_INT(opaq_proto_buffer_count(&q->view.proto), record->buffer_count);
    for (int i = 0; i < record->buffer_count && i < opaq_proto_buffer_count(&q->view.proto); ++i) {
        const struct golden_buffer *expected = &record->buffer[i];
        struct opaq_buffer buffer;
        (void)opaq_proto_buffer(&q->view.proto, i, &buffer, NULL);
        if (strlen(buffer.name) != (size_t)expected->name_length ||
            memcmp(buffer.name, expected->name, (size_t)expected->name_length) != 0 ||
            buffer.bytes != expected->data.bytes) {
            CHECK_FAIL("%.*s: buffer %d is %s of %zu bytes, expected %.*s of %zu", record->name_length,
                       record->name, i, buffer.name, buffer.bytes, expected->name_length, expected->name,
                       expected->data.bytes);
            continue;
        }
        const void *const data = q->view.buffer[i].data;
        CHECK_BYTES(hiding == NULL ? data : hiding_host(hiding, data), expected->data.data, buffer.bytes,
                    "%.*s %s (%s)", record->name_length, record->name, buffer.name, how);
    }
}

static void check_dequant(const struct golden_record *record, const struct tensor *q) {
    for (int i = 0; i < record->dequant_count; ++i) {
        struct opaq_error error;
        struct tensor y = tensor_make(record->input->rows, record->input->columns, OPAQ_F32, NULL);
        if (opaq_dequantize(&q->view, record->dequant[i].usage, NULL, &y.view, &error) != OPAQ_OK) {
            CHECK_FAIL("%.*s: %s", record->name_length, record->name, error.text);
        } else if (tensor_bytes(&y, 0) != record->dequant[i].values.bytes) {
            CHECK_FAIL("%.*s: %zu bytes dequantized, expected %zu", record->name_length, record->name,
                       tensor_bytes(&y, 0), record->dequant[i].values.bytes);
        } else {
            CHECK_BYTES(y.view.buffer[0].data, record->dequant[i].values.data, tensor_bytes(&y, 0),
                        "%.*s dequantized from usage %d", record->name_length, record->name,
                        record->dequant[i].usage);
        }
        tensor_free(&y);
    }
}

static void run_record(const struct golden_record *record, const struct opaq_parallel *parallel) {
    char spec[OPAQ_SPEC_TEXT_BYTES];
    char canonical[OPAQ_SPEC_TEXT_BYTES];
    struct opaq_error error;
    (void)snprintf(spec, sizeof spec, "%.*s", record->spec_length, record->spec);
    struct opaq_view x = input_view(record->input);
    struct tensor q = tensor_make(record->input->rows, record->input->columns, record->input->dtype, spec);
    (void)opaq_spec_print(&q.view.proto.spec, canonical, sizeof canonical, NULL);
    CHECK_EQ_STR(canonical, spec);
    float amax = NAN;
    const struct opaq_quantize_args args = {.scale = record->has_scale ? &record->scale : NULL,
                                            .amax = record->has_amax ? &amax : NULL,
                                            .random = record->random};
    const struct opaq_execution execution = {.parallel = parallel};
    if (opaq_quantize(&x, &args, &execution, &q.view, &error) != OPAQ_OK) {
        CHECK_FAIL("%.*s: %s", record->name_length, record->name, error.text);
    } else {
        check_buffers(record, &q, NULL, parallel == NULL ? "one thread" : "several threads");
        check_dequant(record, &q);
        if (record->has_amax) {
            CHECK_BYTES(&amax, &record->amax, sizeof amax, "%.*s amax", record->name_length, record->name);
        }
    }
    tensor_free(&q);
    free(x.buffer[0].data);
}

/* ---- the same on the test device ---- */

static struct opaq_view device_view(struct hiding *hiding, const struct opaq_view *view) {
    struct opaq_view placed = *view;
    placed.proto.device = hiding_device;
    for (int i = 0; i < opaq_proto_buffer_count(&view->proto); ++i) {
        placed.buffer[i].data = hiding_copy(hiding, view->buffer[i].data, view->buffer[i].bytes);
    }
    return placed;
}

static void dequantize_on_device(const struct golden_record *record, struct hiding *hiding,
                                 const struct tensor *q) {
    for (int i = 0; i < record->dequant_count; ++i) {
        struct opaq_error error = {OPAQ_OK, ""};
        struct tensor y = tensor_make(record->input->rows, record->input->columns, OPAQ_F32, NULL);
        const struct opaq_view placed = device_view(hiding, &y.view);
        hiding_hide(hiding);
        (void)opaq_dequantize(&q->view, record->dequant[i].usage, NULL, &placed, &error);
        hiding_reveal(hiding);
        CHECK_EQ_STR(error.text, "");
        CHECK_BYTES(hiding_host(hiding, placed.buffer[0].data), record->dequant[i].values.data,
                    tensor_bytes(&y, 0), "%.*s dequantized from usage %d on the device", record->name_length,
                    record->name, record->dequant[i].usage);
        tensor_free(&y);
    }
}

static void run_record_on_device(const struct golden_record *record, struct hiding *hiding) {
    char spec[OPAQ_SPEC_TEXT_BYTES];
    struct opaq_error error = {OPAQ_OK, ""};
    (void)snprintf(spec, sizeof spec, "%.*s", record->spec_length, record->spec);
    hiding->used = 0;
    hiding->copied = 0;
    struct opaq_view x = input_view(record->input);
    struct tensor q = tensor_make(record->input->rows, record->input->columns, record->input->dtype, spec);
    const struct opaq_view placed_x = device_view(hiding, &x);
    const struct tensor placed_q = {device_view(hiding, &q.view)};
    const float none = NAN;
    float *const amax = hiding_copy(hiding, &none, sizeof none);
    const float *const scale = hiding_copy(hiding, &record->scale, sizeof record->scale);
    const struct opaq_quantize_args args = {.scale = record->has_scale ? scale : NULL,
                                            .amax = record->has_amax ? amax : NULL,
                                            .random = record->random};
    hiding_hide(hiding);
    (void)opaq_quantize(&placed_x, &args, NULL, &placed_q.view, &error);
    hiding_reveal(hiding);
    CHECK_EQ_STR(error.text, "");
    check_buffers(record, &placed_q, hiding, "on the device");
    if (record->has_amax) {
        CHECK_BYTES(hiding_host(hiding, amax), &record->amax, sizeof record->amax, "%.*s amax on the device",
                    record->name_length, record->name);
    }
    dequantize_on_device(record, hiding, &placed_q);
    tensor_free(&q);
    free(x.buffer[0].data);
}

static void run_on_device(const struct golden_file *file) {
    struct hiding hiding = hiding_make((size_t)4 << 20);
    hiding_install();
    for (int64_t i = 0; i < file->record_count; ++i) {
        run_record_on_device(&file->record[i], &hiding);
    }
    hiding_remove();
    hiding_free(&hiding);
}

static void run_format(const char *format) {
    struct golden_file file;
    struct opaq_pool *pool = NULL;
    if (!golden_read(format, &file) || opaq_pool_create(3, &pool, NULL) != OPAQ_OK) {
        CHECK_FAIL("no golden file or no pool for %s", format);
        return;
    }
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    for (int64_t i = 0; i < file.record_count; ++i) {
        run_record(&file.record[i], NULL);
        run_record(&file.record[i], &parallel);
    }
    run_on_device(&file);
    printf("  %s: %lld cases\n", format, (long long)file.record_count);
    opaq_pool_destroy(pool);
    golden_free(&file);
}

static void every_format(void) {
    for (int i = 0; i < OPAQ_FORMAT_COUNT; ++i) {
        run_format(opaq_format_row((enum opaq_format)i)->name);
    }
}

static const struct test_case tests[] = {TEST(every_format)};
TEST_MAIN(tests)
