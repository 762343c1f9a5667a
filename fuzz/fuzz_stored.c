/* fuzz_stored.c: imports and exports stored rows of small quantized tensors. Mostly as opaq_stored_describe
 * describes them, with a few fields changed. Every tensor has memory of exactly the size that it reaches. */
#include <stdbool.h>

#include "fuzz_call.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char *const texts[] = {
    "fp8",
    "fp8row",
    "fp8blk1",
    "fp8blk2",
    "mxfp8",
    "mxfp4+swizzle",
    "nvfp4",
    "nvfp4+2d",
    "nvfp4+rowscaled+swizzle+global+rule=modelopt",
    "nvfp4+global+rule=compressed-tensors",
    "mxfp8+both",
};

struct memory {
    void *block[OPAQ_BUFFER_LIMIT + 3];
    int count;
};

static void *keep(struct memory *memory, size_t bytes, uint8_t fill) {
    void *made = malloc(bytes + (bytes == 0));
    expect(made != NULL);
    memset(made, fill, bytes);
    memory->block[memory->count++] = made;
    return made;
}

/* Changes a field of a tensor, or regroups its shape. */
static void disturb(struct input *input, struct opaq_tensor *tensor) {
    static const int32_t dtypes[] = {OPAQ_DTYPE_U8,  OPAQ_DTYPE_F32, OPAQ_DTYPE_BF16,
                                     OPAQ_DTYPE_F16, OPAQ_DTYPE_I64, 99};
    const int dim = take(input) % OPAQ_RANK_LIMIT;
    const int64_t number = (int64_t)take(input) - 8;
    switch (take(input) % 6) {
    case 0:
        tensor->dtype = dtypes[(number + 8) % 6];
        break;
    case 1:
        tensor->rank = (int32_t)number;
        break;
    case 2:
        tensor->shape[dim] = number;
        break;
    case 3:
        tensor->strides[dim] = number;
        break;
    case 4: /* a dimension of size 1 in front */
        if (tensor->rank >= 0 && tensor->rank < OPAQ_RANK_LIMIT) {
            memmove(tensor->shape + 1, tensor->shape, 7 * sizeof tensor->shape[0]);
            memmove(tensor->strides + 1, tensor->strides, 7 * sizeof tensor->strides[0]);
            tensor->shape[0] = 1;
            ++tensor->rank;
        }
        break;
    default:
        tensor->shape[dim] = (int64_t)((uint64_t)1 << (number & 63));
        break;
    }
}

static void allocate_part(struct memory *memory, struct opaq_tensor *tensor, uint8_t fill) {
    const bool is_odd = tensor->rank < 0 || tensor->rank > OPAQ_RANK_LIMIT;
    const int64_t bytes = is_odd ? -1 : reach(tensor);
    tensor->data = bytes < 0 ? NULL : keep(memory, (size_t)bytes, fill);
}

static struct opaq_view make_view(struct input *input, struct memory *memory) {
    const char *text = texts[take(input) % (sizeof texts / sizeof texts[0])];
    const int64_t rows = take(input) % 140;
    const int64_t columns = take(input) % 140;
    const int64_t shape[2] = {rows, columns};
    struct opaq_view view;
    struct opaq_spec spec;
    struct opaq_proto proto;
    struct opaq_span spans[OPAQ_BUFFER_LIMIT];
    expect(opaq_spec_parse(text, strlen(text), &spec, NULL) == OPAQ_OK);
    expect(opaq_proto_make(shape, 2, OPAQ_F32, &spec, (struct opaq_device){0, 0}, &proto, NULL) == OPAQ_OK);
    const int count = opaq_proto_buffer_count(&proto);
    for (int i = 0; i < count; ++i) {
        struct opaq_buffer buffer;
        expect(opaq_proto_buffer(&proto, i, &buffer, NULL) == OPAQ_OK);
        spans[i] = (struct opaq_span){keep(memory, buffer.bytes, 0), buffer.bytes};
    }
    expect(opaq_view_quantized(&proto, spans, count, &view, NULL) == OPAQ_OK);
    return view;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input input = {data, size};
    struct memory memory = {{NULL}, 0};
    struct opaq_error error;
    struct opaq_stored stored;
    const struct opaq_view view = make_view(&input, &memory);
    const int64_t first = (int64_t)take(&input) - 8;
    const int64_t rows = take(&input) % 140;
    const uint8_t fill = take(&input);
    const bool is_described = opaq_stored_describe(&view.proto, rows, &stored, &error) == OPAQ_OK;
    if (is_described) {
        struct opaq_tensor *parts[] = {&stored.data, &stored.scale, &stored.global};
        const int changes = take(&input) % 4;
        for (int i = 0; i < changes; ++i) {
            disturb(&input, parts[take(&input) % 3]);
        }
        for (int i = 0; i < 3; ++i) {
            allocate_part(&memory, parts[i], fill);
        }
        const enum opaq_status in = opaq_stored_import(&view, first, &stored, &error);
        const enum opaq_status out = opaq_stored_export(&view, first, rows, &stored, &error);
        if (changes == 0 && out == OPAQ_OK) { /* rows that can be exported can be imported, and the reverse */
            expect(in == OPAQ_OK);
            expect(opaq_stored_import(&view, first, &stored, &error) == OPAQ_OK);
        }
    }
    for (int i = 0; i < memory.count; ++i) {
        free(memory.block[i]);
    }
    return 0;
}
