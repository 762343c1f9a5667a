/* support_stderr.c: see support_stderr.h. */
#include "support_stderr.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static FILE *caught;
static int kept = -1;

static void stop(const char *what) {
    perror(what);
    exit(1);
}

void stderr_catch(int to) {
    caught = tmpfile();
    kept = dup(STDERR_FILENO);
    if (caught == NULL || kept < 0) {
        stop("stderr_catch");
    }
    if (fflush(stderr) != 0 || dup2(to == -1 ? fileno(caught) : to, STDERR_FILENO) < 0) {
        stop("stderr_catch");
    }
}

char *stderr_release(void) {
    if (fflush(stderr) != 0 || dup2(kept, STDERR_FILENO) < 0 || close(kept) != 0 ||
        fseek(caught, 0, SEEK_END) != 0) {
        stop("stderr_release");
    }
    const long length = ftell(caught);
    char *const text = length < 0 ? NULL : calloc((size_t)length + 1, 1);
    rewind(caught);
    if (text == NULL || fread(text, 1, (size_t)length, caught) != (size_t)length) {
        stop("stderr_release");
    }
    (void)fclose(caught);
    return text;
}
