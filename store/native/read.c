/* Reads bytes of files by a call: the counterpart of reading them through a mapping. */

#include "native.h"

#include <errno.h>
#include <unistd.h>

/* read_at(fds, positions, sizes) -> the bytes at each position of each file, concatenated; None if a file ends before, or cannot
   be read. All three are int64. The caller has compared the sizes with the files' lengths. */
PyObject *native_read_at(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    Py_buffer *fds = hold(held, args[0], 8, -1, false, "fds");
    Py_ssize_t count = fds->len / 8, total = 0, i = 0;
    Py_buffer *positions = hold(held, args[1], 8, count, false, "positions"), *sizes = hold(held, args[2], 8, count, false, "sizes");
    if (PyErr_Occurred())
        return NULL;
    const int64_t *fd = fds->buf, *at = positions->buf, *size = sizes->buf;
    for (; i < count; i++)
        if (size[i] < 0 || at[i] < 0 || __builtin_add_overflow(total, size[i], &total))
            return PyErr_Format(PyExc_ValueError, "read_at: %lld bytes at %lld", (long long)size[i], (long long)at[i]);
    PyObject *result = PyBytes_FromStringAndSize(NULL, total);
    if (!result)
        return NULL;
    char *to = PyBytes_AS_STRING(result);
    PyThreadState *others = PyEval_SaveThread();
    for (i = 0; i < count; i++)
        for (int64_t got = 0; got < size[i];) {
            ssize_t more = pread((int)fd[i], to, (size_t)(size[i] - got), (off_t)(at[i] + got));
            if (more <= 0) {
                if (more < 0 && errno == EINTR)
                    continue;
                goto failed;
            }
            got += more;
            to += more;
        }
failed:
    PyEval_RestoreThread(others);
    if (i < count)
        Py_SETREF(result, Py_NewRef(Py_None));
    return result;
}
