/* format/spec_intern.c: one shared copy per spec value. The canonical text's entry owns the value, other texts'
 * entries point to it. */
#include <stdbool.h>
#include <string.h>

#include "base/fork_lock.h"
#include "base/text_table.h"
#include "base/try.h"
#include "opaq/spec.h"
#include "opaq/status.h"

static struct text_table table;

/* fork_lock must be held. */
static enum opaq_status intern_new(const char *text, size_t length, const struct opaq_spec *value,
                                   const struct opaq_spec **spec, struct opaq_error *error) {
    char canonical[OPAQ_SPEC_TEXT_BYTES];
    TRY(opaq_spec_print(value, canonical, sizeof canonical, error));
    if (table.count > OPAQ_INTERN_LIMIT - 2) {
        return opaq_fail(error, OPAQ_ERROR_LIMIT, "spec_intern: %d texts are kept already, which is the limit",
                         table.count);
    }
    const size_t canonical_length = strlen(canonical);
    const struct opaq_spec *shared = text_table_find(&table, canonical, canonical_length);
    if (shared == NULL) {
        shared = text_table_insert(&table, canonical, canonical_length, value, sizeof *value);
    }
    const bool is_canonical = length == canonical_length && memcmp(text, canonical, length) == 0;
    if (shared == NULL || (!is_canonical && text_table_insert(&table, text, length, shared, 0) == NULL)) {
        return opaq_fail(error, OPAQ_ERROR_MEMORY, "spec_intern: no memory for \"%s\"", canonical);
    }
    *spec = shared;
    return OPAQ_OK;
}

enum opaq_status opaq_spec_intern(const char *text, size_t length, const struct opaq_spec **spec,
                                  struct opaq_error *error) {
    if (text == NULL || spec == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "spec_intern: %s is NULL", text == NULL ? "text" : "spec");
    }
    const struct opaq_spec *known = text_table_find(&table, text, length);
    if (known != NULL) {
        *spec = known;
        return OPAQ_OK;
    }
    struct opaq_spec value;
    TRY(opaq_spec_parse(text, length, &value, error));
    enum opaq_status status = OPAQ_OK;
    fork_lock();
    known = text_table_find(&table, text, length);
    if (known != NULL) {
        *spec = known;
    } else {
        status = intern_new(text, length, &value, spec, error);
    }
    fork_unlock();
    return status;
}
