/* fuzz_spec.c: any bytes as a spec's text, or as the 16 bytes of a spec. An accepted spec has one text, which
 * parses to it. libFuzzer; the first byte chooses. */
#include <stdlib.h>
#include <string.h>

#include "opaq/opaq.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void expect(int condition) {
    if (!condition) {
        abort();
    }
}

/* An error names the part and the reason, in one terminated, printable line. */
static void expect_refusal(enum opaq_status status, const struct opaq_error *error) {
    expect(error->status == status && error->text[0] != '\0');
    const char *end = memchr(error->text, '\0', sizeof error->text);
    expect(end != NULL);
    for (const char *p = error->text; p < end; ++p) {
        expect(*p >= ' ' && *p <= '~');
    }
}

/* A valid spec has a canonical text that reads back as the spec and prints as itself. */
static void expect_round_trip(const struct opaq_spec *spec) {
    char text[OPAQ_SPEC_TEXT_BYTES];
    char again[OPAQ_SPEC_TEXT_BYTES];
    struct opaq_spec back;
    struct opaq_error error;
    expect(opaq_spec_check(spec, &error) == OPAQ_OK);
    expect(opaq_spec_print(spec, text, sizeof text, &error) == OPAQ_OK);
    expect(strlen(text) < sizeof text);
    expect(opaq_spec_parse(text, strlen(text), &back, &error) == OPAQ_OK);
    expect(opaq_spec_equal(spec, &back) && opaq_spec_hash(spec) == opaq_spec_hash(&back));
    expect(opaq_spec_print(&back, again, sizeof again, &error) == OPAQ_OK && strcmp(text, again) == 0);
    const struct opaq_spec *shared = NULL;
    const struct opaq_spec *known = NULL;
    const enum opaq_status status = opaq_spec_intern(text, strlen(text), &shared, &error);
    expect(status == OPAQ_OK || status == OPAQ_ERROR_LIMIT);
    if (status == OPAQ_OK) {
        expect(opaq_spec_equal(shared, spec));
        expect(opaq_spec_intern(text, strlen(text), &known, NULL) == OPAQ_OK && known == shared);
    }
    expect(opaq_quantize_kernel(spec) != NULL && opaq_dequantize_kernel(spec) != NULL);
}

static void fuzz_text(const char *text, size_t length) {
    struct opaq_spec spec;
    struct opaq_error error;
    const struct opaq_spec *shared = NULL;
    const enum opaq_status status = opaq_spec_parse(text, length, &spec, &error);
    if (status != OPAQ_OK) {
        expect(status == OPAQ_ERROR_TEXT || status == OPAQ_ERROR_SPEC);
        expect_refusal(status, &error);
        expect(opaq_spec_parse(text, length, &spec, NULL) == status);
        expect(opaq_spec_intern(text, length, &shared, NULL) == status && shared == NULL);
        return;
    }
    expect_round_trip(&spec);
    const enum opaq_status interned = opaq_spec_intern(text, length, &shared, &error);
    expect(interned == OPAQ_ERROR_LIMIT || (interned == OPAQ_OK && opaq_spec_equal(shared, &spec)));
}

static void fuzz_bytes(const uint8_t *data, size_t size) {
    struct opaq_spec spec;
    struct opaq_error error;
    char text[OPAQ_SPEC_TEXT_BYTES];
    memset(&spec, 0, sizeof spec);
    memcpy(&spec, data, size < sizeof spec ? size : sizeof spec);
    const enum opaq_status status = opaq_spec_check(&spec, &error);
    if (status != OPAQ_OK) {
        expect(status == OPAQ_ERROR_SPEC);
        expect_refusal(status, &error);
        expect(opaq_spec_print(&spec, text, sizeof text, NULL) == status);
        expect(opaq_quantize_kernel(&spec) == NULL);
        return;
    }
    expect_round_trip(&spec);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0) {
        return 0;
    }
    if (data[0] & 1) {
        fuzz_bytes(data + 1, size - 1);
    } else {
        char *text = malloc(size); /* of exactly the size, for AddressSanitizer */
        expect(text != NULL);
        memcpy(text, data + 1, size - 1);
        fuzz_text(text, size - 1);
        free(text);
    }
    return 0;
}
