/* cli/write/shared_scale.c: see shared_scale.h. */
#include "cli/write/shared_scale.h"

#include "cli/cli_try.h"

enum { BLOCK = 16, MEMORY = 4096 };

/* Quantizes a tensor with this amax, so that the arithmetic is only in the library. */
static enum opaq_status global_of(const struct opaq_spec *spec, float amax, float *global,
                                  struct opaq_error *error) {
    const struct opaq_device device = {OPAQ_DEVICE_CPU, 0};
    const int64_t shape[2] = {1, BLOCK};
    float x[BLOCK] = {amax};
    _Alignas(64) unsigned char memory[MEMORY];
    struct opaq_view plain;
    struct opaq_view quantized;
    struct opaq_proto proto;
    CLI_TRY(opaq_view_plain(shape, NULL, 2, OPAQ_F32, device, x, sizeof x, &plain, error));
    CLI_TRY(opaq_proto_make(shape, 2, OPAQ_F32, spec, device, &proto, error));
    CLI_TRY(opaq_view_bind(&proto, memory, sizeof memory, &quantized, error));
    CLI_TRY(opaq_quantize(&plain, NULL, NULL, &quantized, error));
    const float *const found = quantized.buffer[opaq_proto_find(&proto, OPAQ_ROLE_AMAX, OPAQ_ROWWISE)].data;
    *global = *found;
    return OPAQ_OK;
}

enum opaq_status shared_scale_of(const struct opaq_spec *spec, const struct opaq_layout_row *scheme, float amax,
                                 struct shared_scale *scale, struct opaq_error *error) {
    *scale = (struct shared_scale){amax, 0};
    if (spec->format != OPAQ_NVFP4) {
        return OPAQ_OK;
    }
    /* For rules without a global scale the layout's is used: w = code * scale * amax / (448 * 6). */
    const bool divides = scheme->rule == OPAQ_RULE_COMPRESSED_TENSORS;
    if ((spec->options & OPAQ_GLOBAL) == 0) {
        const float whole = (float)spec->e4m3_max * 6.0f;
        scale->stored = amax == 0.0f ? 1.0f : divides ? whole / amax : amax / whole;
        return OPAQ_OK;
    }
    CLI_TRY(global_of(spec, amax, &scale->given, error));
    const bool is_divisor = spec->rule == OPAQ_RULE_COMPRESSED_TENSORS;
    scale->stored = is_divisor == divides ? scale->given : scale->given == 0.0f ? 1.0f : 1.0f / scale->given;
    return OPAQ_OK;
}
