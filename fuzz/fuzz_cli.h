/* fuzz_cli.h: shared by the fuzz targets of the command's readers. */
#ifndef FUZZ_CLI_H
#define FUZZ_CLI_H

#include <stdlib.h>
#include <string.h>

#include "opaq/opaq.h"

static inline void expect(int condition) {
    if (!condition) {
        abort();
    }
}

/* An error is one terminated, printable line that begins with the file's name. */
static inline void expect_sentence(enum opaq_status status, const struct opaq_error *error, const char *file) {
    expect(status != OPAQ_OK && error->status == status);
    expect(memchr(error->text, '\0', sizeof error->text) != NULL);
    expect(strncmp(error->text, file, strlen(file)) == 0 && strlen(error->text) > strlen(file));
    for (const char *p = error->text; *p != '\0'; ++p) {
        expect((unsigned char)*p >= ' ' && *p != 0x7F);
    }
}

/* Memory of exactly the size, for AddressSanitizer. */
static inline char *exactly(const uint8_t *data, size_t size) {
    char *const copy = malloc(size + (size == 0));
    expect(copy != NULL);
    if (size != 0) {
        memcpy(copy, data, size);
    }
    return copy;
}

#endif
