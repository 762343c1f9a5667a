/* fuzz_proto.c: any bytes as a prototype's text, as its struct, or as the arguments it is made from. An
 * accepted prototype can be described, printed, parsed again and bound; small ones are quantized and
 * dequantized too. libFuzzer; the first byte chooses. */
#include <stdlib.h>
#include <string.h>

#include "opaq/opaq.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { SMALL_BYTES = 1 << 16 };

static void expect(int condition) {
    if (!condition) {
        abort();
    }
}

/* ---- bytes, read in sequence; zeros after the last ---- */

struct source {
    const uint8_t *data;
    size_t left;
};

static void take(struct source *source, void *to, size_t bytes) {
    const size_t n = bytes < source->left ? bytes : source->left;
    memset(to, 0, bytes);
    if (n > 0) {
        memcpy(to, source->data, n);
    }
    source->data += n;
    source->left -= n;
}

static unsigned take_byte(struct source *source) {
    uint8_t byte;
    take(source, &byte, 1);
    return byte;
}

/* ---- memory of exactly the right size ---- */

static void allocate(const struct opaq_proto *proto, struct opaq_view *view) {
    memset(view, 0, sizeof *view);
    view->proto = *proto;
    view->row_stride = proto->is_quantized ? 0 : opaq_proto_columns(proto);
    for (int i = 0; i < opaq_proto_buffer_count(proto); ++i) {
        struct opaq_buffer buffer;
        expect(opaq_proto_buffer(proto, i, &buffer, NULL) == OPAQ_OK);
        view->buffer[i] = (struct opaq_span){malloc(buffer.bytes > 0 ? buffer.bytes : 1), buffer.bytes};
        expect(view->buffer[i].data != NULL);
    }
}

static void release(struct opaq_view *view) {
    for (int i = 0; i < OPAQ_BUFFER_LIMIT; ++i) {
        free(view->buffer[i].data);
    }
}

static void fill(struct source *source, const struct opaq_view *view) {
    for (int i = 0; i < OPAQ_BUFFER_LIMIT; ++i) {
        uint8_t pattern[64];
        uint8_t *bytes = view->buffer[i].data;
        take(source, pattern, sizeof pattern);
        for (size_t k = 0; k < view->buffer[i].bytes; ++k) {
            bytes[k] = (uint8_t)(pattern[k % 64] + (k / 64) * 7);
        }
    }
}

/* ---- operations ---- */

static void run_quantize(struct source *source, const struct opaq_proto *proto,
                         const struct opaq_proto *plain) {
    struct opaq_view x;
    struct opaq_view q;
    struct opaq_view other;
    struct opaq_error error;
    float scale;
    struct opaq_quantize_args args = {0};
    allocate(plain, &x);
    allocate(proto, &q);
    allocate(proto, &other);
    fill(source, &x);
    take(source, &scale, sizeof scale);
    take(source, &args.random, sizeof args.random);
    args.random.offset >>= 1;
    args.scale = proto->spec.options & OPAQ_DELAYED ? &scale : NULL;
    fill(source, &other); /* the initial contents do not matter */
    expect(opaq_quantize(&x, &args, NULL, &q, &error) == OPAQ_OK);
    expect(opaq_quantize(&x, &args, NULL, &other, &error) == OPAQ_OK);
    for (int i = 0; i < OPAQ_BUFFER_LIMIT; ++i) {
        expect(q.buffer[i].bytes == 0 ||
               memcmp(q.buffer[i].data, other.buffer[i].data, q.buffer[i].bytes) == 0);
    }
    for (int usage = 0; usage <= 3; ++usage) {
        const int good = usage < 3 && (usage == 0 || (usage & proto->spec.usage));
        expect((opaq_dequantize(&q, usage, NULL, &x, &error) == OPAQ_OK) == good);
    }
    fill(source, &q); /* any bytes can be dequantized */
    for (int usage = 1; usage <= 2; ++usage) {
        if (usage & proto->spec.usage) {
            const int64_t count = opaq_amax_count(proto, (enum opaq_usage)usage);
            float *amax = malloc(count > 0 ? (size_t)count * sizeof *amax : 1);
            expect(opaq_dequantize(&q, usage, NULL, &x, &error) == OPAQ_OK);
            if (count > 0) {
                /* a global scale is no amax */
                expect((opaq_amax(&x, &proto->spec, (enum opaq_usage)usage, NULL, amax, count, &error) ==
                        OPAQ_OK) == ((proto->spec.options & OPAQ_GLOBAL) == 0));
            }
            free(amax);
        }
    }
    release(&other);
    release(&q);
    release(&x);
}

/* ---- properties of every accepted prototype ---- */

static void expect_text(const struct opaq_proto *proto) {
    char text[OPAQ_PROTO_TEXT_BYTES];
    char again[OPAQ_PROTO_TEXT_BYTES];
    struct opaq_proto back;
    expect(opaq_proto_print(proto, text, sizeof text, NULL) == OPAQ_OK);
    expect(opaq_proto_parse(text, strlen(text), &back, NULL) == OPAQ_OK && opaq_proto_equal(proto, &back));
    expect(opaq_proto_print(&back, again, sizeof again, NULL) == OPAQ_OK && strcmp(text, again) == 0);
}

static void explore(struct source *source, const struct opaq_proto *proto) {
    struct opaq_error error;
    size_t total = 0;
    size_t bytes = 0;
    size_t bound = 0;
    const int count = opaq_proto_buffer_count(proto);
    expect(opaq_proto_check(proto, &error) == OPAQ_OK);
    expect(count >= 1 && count <= OPAQ_BUFFER_LIMIT);
    expect(opaq_proto_rows(proto) >= 0 && opaq_proto_columns(proto) >= 0);
    for (int i = 0; i < count; ++i) {
        struct opaq_buffer buffer;
        expect(opaq_proto_buffer(proto, i, &buffer, &error) == OPAQ_OK);
        expect(buffer.rank >= 0 && buffer.rank <= OPAQ_RANK_LIMIT && buffer.bytes <= (size_t)1 << 62);
        total += buffer.bytes;
    }
    expect(total <= (size_t)1 << 62);
    expect(opaq_proto_bytes(proto, &bytes, &error) == OPAQ_OK && bytes == total);
    expect(opaq_view_bind_bytes(proto, &bound, &error) == OPAQ_OK && bound >= total && bound % 64 == 0);
    expect_text(proto);
    struct opaq_proto changed = *proto;
    const int usage = (int)(take_byte(source) % 5);
    if (opaq_proto_update_usage(&changed, usage, &error) == OPAQ_OK) {
        expect(proto->is_quantized && changed.spec.usage == usage);
        expect_text(&changed);
    }
    if (total > SMALL_BYTES) {
        return;
    }
    struct opaq_view view;
    void *memory = NULL;
    expect(posix_memalign(&memory, 64, bound + 64) == 0);
    expect(opaq_view_bind(proto, memory, bound, &view, &error) == OPAQ_OK &&
           opaq_view_check(&view, &error) == OPAQ_OK);
    free(memory);
    struct opaq_proto plain;
    if (proto->is_quantized && proto->device.type == OPAQ_DEVICE_CPU &&
        opaq_proto_make(proto->shape, proto->rank, (enum opaq_element)proto->dtype, NULL, proto->device, &plain,
                        &error) == OPAQ_OK &&
        opaq_proto_bytes(&plain, &bytes, &error) == OPAQ_OK && bytes <= SMALL_BYTES) {
        run_quantize(source, proto, &plain);
    }
}

/* ---- sources ---- */

static void from_text(struct source *source) {
    char *text = malloc(source->left + 1);
    struct opaq_proto proto;
    struct opaq_error error;
    expect(text != NULL);
    const size_t length = source->left;
    take(source, text, length);
    text = realloc(text, length > 0 ? length : 1); /* of exactly the size, for AddressSanitizer */
    if (opaq_proto_parse(text, length, &proto, &error) == OPAQ_OK) {
        explore(source, &proto);
    }
    free(text);
}

static void from_struct(struct source *source) {
    struct opaq_proto proto;
    struct opaq_error error;
    struct opaq_buffer buffer;
    size_t bytes;
    char text[OPAQ_PROTO_TEXT_BYTES];
    take(source, &proto, sizeof proto);
    if (opaq_proto_check(&proto, &error) == OPAQ_OK) {
        explore(source, &proto);
    } else {
        expect(opaq_proto_buffer(&proto, 0, &buffer, NULL) != OPAQ_OK);
        expect(opaq_proto_bytes(&proto, &bytes, NULL) != OPAQ_OK);
        expect(opaq_proto_print(&proto, text, sizeof text, NULL) != OPAQ_OK);
        expect(opaq_view_bind_bytes(&proto, &bytes, NULL) != OPAQ_OK);
    }
}

/* Mostly valid values, so that many are accepted. */
static void from_parts(struct source *source) {
    static const enum opaq_element dtypes[] = {OPAQ_F16, OPAQ_BF16, OPAQ_F32};
    int64_t shape[OPAQ_RANK_LIMIT];
    struct opaq_spec spec;
    struct opaq_proto proto;
    struct opaq_error error;
    const int rank = (int)(take_byte(source) % (OPAQ_RANK_LIMIT + 1));
    const enum opaq_element dtype = dtypes[take_byte(source) % 3];
    const unsigned kind = take_byte(source);
    for (int i = 0; i < rank; ++i) {
        int64_t wide;
        const unsigned small = take_byte(source);
        if (kind == 1) {
            take(source, &wide, sizeof wide);
        }
        shape[i] = kind == 1 ? wide : kind == 2 ? (int64_t)1 << small % 63 : small % (i + 1 < rank ? 6 : 200);
    }
    (void)opaq_spec_make((enum opaq_format)(take_byte(source) % OPAQ_FORMAT_COUNT), &spec, NULL);
    const unsigned row_options = opaq_format_row((enum opaq_format)spec.format)->options;
    spec.options = (uint16_t)(take_byte(source) & row_options);
    spec.usage = (uint8_t)(1 + take_byte(source) % 3);
    const unsigned rule = take_byte(source);
    spec.rule = rule % 2 ? (uint8_t)(rule / 2 % OPAQ_RULE_COUNT) : OPAQ_RULE_TE;
    spec.options |=
        (uint16_t)(rule & 128 ? row_options & OPAQ_GLOBAL : 0); /* which the byte above does not reach */
    spec.element = spec.element == OPAQ_E4M3 && take_byte(source) % 2 ? OPAQ_E5M2 : spec.element;
    if (spec.options & OPAQ_HADAMARD) {
        take(source, &spec.hadamard_mask, sizeof spec.hadamard_mask);
    }
    if (spec.options & OPAQ_4OVER6) {
        spec.error_mode = (uint8_t)(1 + take_byte(source) % 2);
        spec.e4m3_max = take_byte(source) % 2 ? 448 : 256;
    }
    if (take_byte(source) % 4 == 3) {
        take(source, &spec.epsilon, sizeof spec.epsilon);
    }
    const struct opaq_device device = {kind == 3, (int32_t)(kind == 3)};
    const int is_plain = kind == 4;
    if (opaq_proto_make(shape, rank, dtype, is_plain ? NULL : &spec, device, &proto, &error) == OPAQ_OK) {
        explore(source, &proto);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct source source = {data, size};
    switch (take_byte(&source) % 4) {
    case 0:
        from_text(&source);
        break;
    case 1:
        from_struct(&source);
        break;
    default:
        from_parts(&source);
        break;
    }
    return 0;
}
