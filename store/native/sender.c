/* A put with all its options, from the caller's arguments to the receipt, in one call.

   `PutMethod` is the method `put` of a class, made of a Python function. It puts an ordinary message by the `Sender` of its
   object, like `LogWriter.put` and, with topics, `Router.put`. For any other message it calls the function with the same
   arguments; nothing was written before that. */

#include "native.h"
#include <datetime.h>
#include <math.h>
#include <stddef.h>
#include <structmember.h>
#include <time.h>

/* Names of the arguments; the first are those of `Options`. */
enum { TAG, KEYS, PROPERTIES, UNIQUE_KEY, MESSAGE_GROUP, DELAY, DELIVER_AT, DELAY_LEVEL, FLAG, COMPRESSION, DURABILITY, QUEUE_ID,
       OPTION_NAMES };
static PyObject *option_names[OPTION_NAMES];
#ifdef __APPLE__
#define PYTHON_MONOTONIC CLOCK_UPTIME_RAW
#else
#define PYTHON_MONOTONIC CLOCK_MONOTONIC
#endif
enum { SAMPLED = 63, UNIQUE_KEY_DIGITS = 34, MOST_DELAY_BYTES = 512 };

typedef struct {
    PyObject_HEAD
    long long max_body;
    int flushes; /* true: a put waits for the disk unless `durability` says otherwise */
    PyObject *tip, *putters, *finish, *after, *note, *reserved;
    /* With a broker only; without one `topics` is NULL. */
    PyObject *topics, *counters, *group_queue, *group_hash, *keys, *delayed, *timer_topic, *schedule_topic;
    long long levels, max_delay_ms, precision_ms;
} Sender;

#define OBJECTS(F) F(tip) F(putters) F(finish) F(after) F(note) F(reserved) F(topics) F(counters) \
    F(group_queue) F(group_hash) F(keys) F(delayed) F(timer_topic) F(schedule_topic)

COLLECTED(sender, Sender, OBJECTS)

int sender_init(void)
{
    PyDateTime_IMPORT;
    static const char *const texts[OPTION_NAMES] = {"tag", "keys", "properties", "unique_key", "message_group", "delay",
                                                    "deliver_at", "delay_level", "flag", "compressed", "durability", "queue_id"};
    for (int i = 0; i < OPTION_NAMES; i++)
        if (!(option_names[i] = PyUnicode_InternFromString(texts[i])))
            return -1;
    return PyDateTimeAPI ? 0 : -1;
}

/* A message that is being put. */
typedef struct {
    PyObject *topic, *body, *given[OPTION_NAMES]; /* borrowed from the caller */
    bool waits;                                /* for the disk */
    bool from_now;
    double requested_ms;                       /* requested delivery time; -1: at once */
    long long level, due_ms, slot_ms;          /* of its delay; without one 0, -1 and -1 */
    int32_t flag, sys_flag;
    PyObject *queue_id, *unique_key;           /* owned, like the next three */
    PyObject *stored_id, *queue, *tail;        /* of the queue that it is stored in, which may be one where it waits */
    Text text;
} Outgoing;

static bool is_text(PyObject *value, const char *text)
{
    return PyUnicode_CheckExact(value) && PyUnicode_CompareWithASCIIString(value, text) == 0;
}

/* Read the delivery time; false if it is invalid or rare. */
static bool read_delay(const Sender *self, Outgoing *message)
{
    PyObject *level = message->given[DELAY_LEVEL], *delay = message->given[DELAY];
    PyObject *requested = delay ? delay : message->given[DELIVER_AT];
    if (level) {
        int32_t asked;
        if (!small_integer(level, &asked) || asked < 0 || asked > self->levels)
            return false;
        message->level = asked;
        return true;
    }
    double seconds = -1;
    if (PyFloat_CheckExact(requested))
        seconds = PyFloat_AS_DOUBLE(requested);
    else if (PyLong_CheckExact(requested))
        seconds = PyLong_AsDouble(requested);
    else if (delay && PyDelta_CheckExact(delay) && (unsigned)PyDateTime_DELTA_GET_DAYS(delay) < 100000) /* exact to microseconds */
        seconds = (double)((PyDateTime_DELTA_GET_DAYS(delay) * 86400LL + PyDateTime_DELTA_GET_SECONDS(delay)) * 1000000 +
                           PyDateTime_DELTA_GET_MICROSECONDS(delay)) / 1e6;
    PyErr_Clear(); /* of an int that is beyond every float */
    message->requested_ms = ceil(seconds * 1000);
    message->from_now = delay != NULL;
    if (delay && message->requested_ms == 0)
        message->requested_ms = -1;
    /* Below 1e12 s a double represents each millisecond. */
    return seconds >= 0 && seconds < 1e12;
}

/* Read the arguments and encode the options; false if Python must handle them. */
static bool read_arguments(const Sender *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names, Outgoing *message)
{
    if (nargs < 2 || nargs > 2 + !self->topics || !PyUnicode_CheckExact(args[0]) || !PyBytes_CheckExact(args[1]) ||
        PyBytes_GET_SIZE(args[1]) > self->max_body)
        return false;
    memset(message, 0, offsetof(Outgoing, text.bytes));
    message->text.size = 0;
    message->requested_ms = message->due_ms = message->slot_ms = -1;
    message->topic = args[0];
    message->body = args[1];
    message->waits = self->flushes;
    PyObject **given = message->given;
    if (nargs > 2)
        given[QUEUE_ID] = args[2];
    Py_ssize_t count = names ? PyTuple_GET_SIZE(names) : 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        int which = 0;
        while (which < OPTION_NAMES && PyTuple_GET_ITEM(names, i) != option_names[which])
            which++;
        PyObject *value = args[nargs + i] == Py_None ? NULL : args[nargs + i];
        if (which == OPTION_NAMES || given[which]) /* unknown, given twice, or its name is not the interned string */
            return false;
        if (!value && (which == FLAG || (which == QUEUE_ID && !self->topics))) /* None is not allowed here */
            return false;
        if (!self->topics && which >= DELAY && which != FLAG && which != DURABILITY && which != QUEUE_ID)
            return false; /* an option that only a broker has */
        given[which] = value;
    }
    if (given[QUEUE_ID] && !PyLong_CheckExact(given[QUEUE_ID]))
        return false;
    if (given[DURABILITY]) {
        message->waits = is_text(given[DURABILITY], "flush");
        if (!message->waits && !is_text(given[DURABILITY], "append"))
            return false;
    }
    if (given[FLAG] && !small_integer(given[FLAG], &message->flag))
        return false;
    if (given[COMPRESSION]) {
        if (!self->topics || !is_text(given[COMPRESSION], "zlib"))
            return false;
        message->sys_flag = COMPRESSED | COMPRESSION_ZLIB;
    }
    bool delayed = given[DELAY] || given[DELIVER_AT] || given[DELAY_LEVEL];
    if (delayed && (!self->topics || !!given[MESSAGE_GROUP] + !!given[DELAY] + !!given[DELIVER_AT] + !!given[DELAY_LEVEL] > 1))
        return false;
    Options options = {given[TAG], given[KEYS], given[PROPERTIES], given[UNIQUE_KEY], given[MESSAGE_GROUP]};
    return add_options(&message->text, &options, self->reserved) && (!delayed || read_delay(self, message));
}

/* Each step below returns 1 when done, 0 if Python must do the put, -1 with an exception. */

/* Choose the queue, like `Router.put`. */
static int choose_queue(Sender *self, Outgoing *message)
{
    PyObject *wanted = message->given[QUEUE_ID], *group = message->given[MESSAGE_GROUP];
    if (!self->topics) {
        message->queue_id = wanted ? Py_NewRef(wanted) : PyLong_FromLong(0);
        return message->queue_id ? 1 : -1;
    }
    PyObject *sendable = PyObject_GetAttr(self->topics, name__sendable);
    PyObject *config = sendable && PyDict_Check(sendable) ? PyDict_GetItemWithError(sendable, message->topic) : NULL;
    Py_XINCREF(config);
    PyObject *queues = config ? PyObject_GetAttr(config, name_write_queues) : NULL;
    long long count, number;
    int done = 0;
    if (!number_of(queues, &count) || count < 1 || (wanted && group)) {
        done = 0;
    } else if (wanted) {
        if ((done = number_of(wanted, &number) && number >= 0 && number < count))
            message->queue_id = Py_NewRef(wanted);
    } else if (group) {
        PyObject *given[] = {group, queues, self->group_hash};
        done = (message->queue_id = PyObject_Vectorcall(self->group_queue, given, 3, NULL)) != NULL;
    } else {
        PyObject *counter = PyDict_GetItemWithError(self->counters, message->topic);
        PyObject *turn = counter && PyIter_Check(counter) ? PyIter_Next(counter) : NULL;
        if ((done = number_of(turn, &number)))
            message->queue_id = PyLong_FromLongLong(number % count);
        Py_XDECREF(turn);
    }
    Py_XDECREF(queues);
    Py_XDECREF(config);
    Py_XDECREF(sendable);
    return PyErr_Occurred() ? -1 : done;
}

/* The clock of Python's `monotonic`. */
static long long monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(PYTHON_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Make a unique key, like `UniqueKeys.new`; NULL without an exception if that must do it. */
static PyObject *new_key(PyObject *keys)
{
    PyObject *prefix = PyObject_GetAttr(keys, name__prefix), *origin = PyObject_GetAttr(keys, name__origin_ms);
    PyObject *sequence = PyObject_GetAttr(keys, name__sequence), *key = NULL;
    char text[UNIQUE_KEY_DIGITS];
    if (prefix && origin && sequence && PyUnicode_Check(prefix) && PyUnicode_IS_COMPACT_ASCII(prefix) &&
        PyUnicode_GET_LENGTH(prefix) == UNIQUE_KEY_DIGITS - 16 && PyIter_Check(sequence)) {
        PyObject *next = PyIter_Next(sequence);
        long long seconds = (PyLong_AsLongLong(origin) + monotonic_ns() / 1000000) / 1000;
        uint64_t number = (uint64_t)seconds << 32 | (next ? PyLong_AsUnsignedLongLongMask(next) & UINT32_MAX : 0);
        memcpy(text, PyUnicode_DATA(prefix), sizeof text - 16);
        for (int i = 0; i < 16; i++)
            text[sizeof text - 1 - i] = "0123456789ABCDEF"[number >> 4 * i & 15];
        key = next && !PyErr_Occurred() ? PyUnicode_FromStringAndSize(text, sizeof text) : NULL;
        Py_XDECREF(next);
    }
    Py_XDECREF(prefix);
    Py_XDECREF(origin);
    Py_XDECREF(sequence);
    return key;
}

PyObject *putter_of(PyObject *putters, PyObject *topic, PyObject *queue_id, PyObject **tail)
{
    PyObject *queues = PyUnicode_CheckExact(topic) ? PyDict_GetItemWithError(putters, topic) : NULL;
    PyObject *queue =
        queues && PyDict_Check(queues) && PyLong_CheckExact(queue_id) ? PyDict_GetItemWithError(queues, queue_id) : NULL;
    PyObject *found = queue && is_a(queue, &QueueTailType) ? ((QueueTail *)queue)->plain_tail : NULL;
    *tail = found && PyBytes_Check(found) && PyBytes_GET_SIZE(found) >= PROPERTIES_LENGTH_BYTES ? Py_NewRef(found) : NULL;
    return *tail ? queue : NULL;
}

static PyObject *topic_of(const Sender *self, const Outgoing *message)
{
    return message->level ? self->schedule_topic : message->slot_ms >= 0 ? self->timer_topic : message->topic;
}

/* Find the queue that the message is stored in, by `stored_id`; false if it is not known here. */
static bool find_queue(const Sender *self, Outgoing *message)
{
    message->queue = Py_XNewRef(putter_of(self->putters, topic_of(self, message), message->stored_id, &message->tail));
    return message->queue && log_tail_has_receipts(self->tip, (QueueTail *)message->queue);
}

/* Compute the delivery time of a message that must wait, and the queue in which it waits. */
static int find_delivery_time(const Sender *self, Outgoing *message)
{
    if (message->requested_ms >= 0) {
        long long now_ms = tip_now_ms(self->tip);
        if (now_ms < 0)
            return PyErr_Occurred() ? -1 : 0;
        message->due_ms = (long long)message->requested_ms + (message->from_now ? now_ms : 0);
        if (message->due_ms - now_ms > self->max_delay_ms)
            return 0;
        if (message->due_ms > now_ms)
            message->slot_ms = (message->due_ms - 1) / self->precision_ms * self->precision_ms;
    }
    if (!message->level && message->slot_ms < 0)
        return 1;
    if (!(message->stored_id = PyLong_FromLongLong(message->level ? message->level - 1 : 0)))
        return -1;
    bool found = find_queue(self, message); /* if not, Python creates its topic */
    return PyErr_Occurred() ? -1 : found && message->text.size <= MOST_OPTIONS_BYTES - MOST_DELAY_BYTES;
}

/* Add the properties of the delay, like `routed_properties` and `delay_route`. */
static int add_delay(Sender *self, Outgoing *message)
{
    Text *text = &message->text;
    if ((message->level && !add_number(text, "DELAY", message->level)) ||
        (message->due_ms >= 0 && !add_number(text, "TIMER_DELIVER_MS", message->due_ms)) ||
        (message->slot_ms >= 0 && !add_number(text, "TIMER_OUT_MS", message->slot_ms)))
        return 0;
    if (!message->stored_id)
        return 1;
    Py_ssize_t size;
    const char *topic = PyUnicode_AsUTF8AndSize(message->topic, &size);
    if (!topic)
        return -1;
    if (!add(text, "REAL_TOPIC\1", 11) || !add(text, topic, (size_t)size) || !add(text, "\2", 1) ||
        !add_number(text, "REAL_QID", PyLong_AsLongLong(message->queue_id)))
        return 0;
    if (message->slot_ms >= 0 && message->unique_key == Py_None) {
        Py_SETREF(message->unique_key, new_key(self->keys));
        if (!message->unique_key)
            return PyErr_Occurred() ? -1 : 0;
        if (!add(text, "UNIQ_KEY\1", 9) || !add(text, PyUnicode_DATA(message->unique_key), UNIQUE_KEY_DIGITS) ||
            !add(text, "\2", 1))
            return 0;
    }
    return 1;
}

/* Store a message and do the rest of `LogWriter.put`. 1 with the receipt, 0 if Python must do it, -1 with an exception. */
static int store_at(Sender *self, QueueTail *queue, PyObject *tail, PyObject *body, const Extra *extra, PyObject *unique_key,
                    bool waits, PyObject **receipt)
{
    long long sampled_ns = queue->next_offset & SAMPLED ? 0 : monotonic_ns();
    Stored stored;
    int done = log_tail_store(self->tip, queue, PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body), PyBytes_AS_STRING(tail),
                              PyBytes_GET_SIZE(tail), extra, &stored);
    if (done <= 0)
        return done;
    *receipt = log_tail_receipt(self->tip, queue, &stored, unique_key);
    if (*receipt &&
        (((waits || self->flushes) && !succeeded(PyObject_CallOneArg(self->after, waits ? *receipt : Py_None))) ||
         (sampled_ns && !succeeded(PyObject_CallFunction(self->note, "OL", queue, monotonic_ns() - sampled_ns)))))
        Py_CLEAR(*receipt);
    return *receipt ? 1 : -1;
}

/* Store the message, by Python if need be. Returns the receipt; NULL with an exception. */
static PyObject *store(Sender *self, Outgoing *message, QueueTail *queue)
{
    Text *text = &message->text;
    Extra extra = {text->bytes, (Py_ssize_t)text->size, (uint32_t)message->flag, (uint32_t)message->sys_flag};
    PyObject *receipt = NULL;
    int done = !queue ? 0 : store_at(self, queue, message->tail, message->body, &extra, message->unique_key, message->waits,
                                     &receipt);
    if (done < 0)
        return NULL;
    if (!done) {
        PyObject *properties = PyBytes_FromStringAndSize(text->bytes, (Py_ssize_t)text->size);
        receipt = properties ? PyObject_CallFunction(self->finish, "OOOOOiii", topic_of(self, message), message->stored_id,
                                                     message->body, properties, message->unique_key, message->flag,
                                                     message->sys_flag, message->waits)
                             : NULL;
        Py_XDECREF(properties);
    }
    if (receipt && message->slot_ms >= 0 && PyTuple_Check(receipt) && PyTuple_GET_SIZE(receipt) == RECEIPT_ITEMS) {
        PyObject *items[RECEIPT_ITEMS + 2];
        for (int i = 0; i < RECEIPT_ITEMS; i++)
            items[i] = Py_NewRef(PyTuple_GET_ITEM(receipt, i));
        items[RECEIPT_ITEMS] = Py_NewRef(message->topic);
        items[RECEIPT_ITEMS + 1] = PyLong_FromLongLong(message->slot_ms + 1);
        Py_SETREF(receipt, tuple_of(self->delayed, items, RECEIPT_ITEMS + 2));
    }
    return receipt;
}

/* Put an ordinary message and return its receipt; NULL, without an exception, if Python must do the put. */
static PyObject *sender_put(Sender *self, PyObject *const *args, Py_ssize_t nargs, PyObject *names)
{
    Outgoing message;
    if (!read_arguments(self, args, nargs, names, &message))
        return NULL;
    PyObject *receipt = NULL;
    message.unique_key = Py_NewRef(message.given[UNIQUE_KEY] ? message.given[UNIQUE_KEY] : Py_None);
    int done = find_delivery_time(self, &message);
    if (done > 0)
        done = choose_queue(self, &message);
    if (done > 0)
        done = add_delay(self, &message);
    if (done > 0) {
        bool waits = message.stored_id != NULL;
        if (!waits)
            message.stored_id = Py_NewRef(message.queue_id);
        bool found = waits || find_queue(self, &message);
        receipt = PyErr_Occurred() ? NULL : store(self, &message, found ? (QueueTail *)message.queue : NULL);
    }
    Py_XDECREF(message.queue_id);
    Py_XDECREF(message.unique_key);
    Py_XDECREF(message.stored_id);
    Py_XDECREF(message.queue);
    Py_XDECREF(message.tail);
    return receipt;
}

/* Copy properties as clients send them, name 1 value 2, perhaps without the last 2. False if Python must look at them: damage,
   a name twice, a name that changes where or how the message is stored, no unique key. Otherwise `key` is set. */
static bool add_sent(Text *to, const char *properties, Py_ssize_t size, PyObject **key)
{
    static const char *const special[] = {"TRAN_MSG", "DELAY", "TIMER_", "RETRY_TOPIC", "CORRELATION_ID", "__CRC32#", "INNER_"};
    enum { SPECIAL = sizeof special / sizeof *special, MOST_PAIRS = 32 };
    struct { const char *at; size_t size; } names[MOST_PAIRS];
    int count = 0;
    if (!size || !add(to, properties, (size_t)size) || (properties[size - 1] != 2 && !add(to, "\2", 1)))
        return false;
    const char *key_at = NULL, *key_end = NULL, *end = to->bytes + to->size, *stop;
    for (const char *at = to->bytes; at < end; at = stop + 1, count++) {
        stop = memchr(at, 2, (size_t)(end - at)); /* the text ends with one */
        const char *middle = memchr(at, 1, (size_t)(stop - at));
        if (!middle || middle == at || middle + 1 == stop || memchr(middle + 1, 1, (size_t)(stop - middle - 1)) ||
            count == MOST_PAIRS)
            return false;
        size_t width = (size_t)(middle - at);
        for (int i = 0; i < SPECIAL; i++)
            if (*at == *special[i] && width >= strlen(special[i]) && !memcmp(at, special[i], strlen(special[i])))
                return false;
        for (int i = 0; i < count; i++)
            if (names[i].size == width && !memcmp(names[i].at, at, width))
                return false;
        names[count].at = at;
        names[count].size = width;
        if (width == 8 && !memcmp(at, "UNIQ_KEY", 8)) {
            key_at = middle + 1;
            key_end = stop;
        }
    }
    return key_at && (*key = PyUnicode_FromStringAndSize(key_at, key_end - key_at));
}

/* append(topic, queue_id, body, properties, flag, sys_flag, born_ms, born_host, reconsume_times): store a record with these fields,
   like `Router.append` without a wait for the disk. Returns the receipt, or None if `Router.append` must do it. */
static PyObject *sender_append(Sender *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments("append", nargs, 9))
        return NULL;
    PyObject *topic = args[0], *body = args[2], *tail = NULL, *unique_key = NULL, *receipt = NULL;
    int32_t flag, sys_flag, times;
    long long born_ms;
    if (!PyBytes_CheckExact(body) || PyBytes_GET_SIZE(body) > self->max_body || !PyUnicode_CheckExact(args[3]) ||
        !number_of(args[6], &born_ms) || !small_integer(args[4], &flag) || !small_integer(args[5], &sys_flag) || !small_integer(args[8], &times) ||
        !is_host(args[7]) || self->flushes || sys_flag & (TRANSACTION_MASK | INNER_BATCH))
        Py_RETURN_NONE;
    Py_ssize_t size;
    const char *properties = PyUnicode_AsUTF8AndSize(args[3], &size);
    Text text;
    text.size = 0;
    if (properties && add_sent(&text, properties, size, &unique_key)) {
        PyObject *queue = Py_XNewRef(putter_of(self->putters, topic, args[1], &tail));
        Extra extra = {text.bytes, (Py_ssize_t)text.size, (uint32_t)flag, (uint32_t)(sys_flag & ~(BORN_HOST_V6 | STORE_HOST_V6)),
                       (uint32_t)times, args[7], born_ms};
        if (queue && log_tail_has_receipts(self->tip, (QueueTail *)queue) &&
            store_at(self, (QueueTail *)queue, tail, body, &extra, unique_key, false, &receipt) < 0)
            Py_CLEAR(receipt);
        Py_XDECREF(queue);
        Py_XDECREF(tail);
    } else if (!properties && PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
        PyErr_Clear(); /* Python says which character it is */
    }
    Py_XDECREF(unique_key);
    return receipt ? receipt : PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef sender_methods[] = {
    {"append", (PyCFunction)(void (*)(void))sender_append, METH_FASTCALL, "Append a record; None: see `Router.append`."},
    {NULL},
};

/* Sender(max_body, flushes, tip, ...): members by name. Those from `topics` on need a broker: all of them, or none. */
static PyObject *sender_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
#define NAME(member) #member,
    static char *names[] = {"max_body", "flushes", OBJECTS(NAME) "levels", "max_delay_ms", "precision_ms", NULL};
    Sender given;
    memset(&given, 0, sizeof given);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LpO!O!OOOO!|OO!OOOOOOLLL", names, &given.max_body, &given.flushes, &LogTailType,
                                     &given.tip, &PyDict_Type, &given.putters, &given.finish, &given.after, &given.note,
                                     &PyFrozenSet_Type, &given.reserved, &given.topics, &PyDict_Type, &given.counters,
                                     &given.group_queue, &given.group_hash, &given.keys, &given.delayed, &given.timer_topic,
                                     &given.schedule_topic, &given.levels, &given.max_delay_ms, &given.precision_ms))
        return NULL;
#define LACKS(member) || !given.member
    if (given.topics && (!makes_tuples(given.delayed) || given.precision_ms < 1 OBJECTS(LACKS)))
        return PyErr_Format(PyExc_TypeError, "a sender with topics needs all arguments of a broker");
    Sender *self = (Sender *)type->tp_alloc(type, 0);
    if (self) {
        given.ob_base = self->ob_base;
        *self = given;
#define TAKE(member) Py_XINCREF(self->member);
        OBJECTS(TAKE)
    }
    return (PyObject *)self;
}

PyTypeObject SenderType = {
    COLLECTED_TYPE(sender, Sender, sender_new),
    .tp_doc = "References to a store for puts of messages with options.",
    .tp_methods = sender_methods,
};

/* --- the method --- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *function, *attributes;
    PyObject *owner;           /* the class; NULL until it is created */
    PyMemberDescrObject *slot; /* `_sender` of the class */
} PutMethod;

#define METHOD_OBJECTS(F) F(function) F(attributes) F(owner) F(slot)

COLLECTED(method, PutMethod, METHOD_OBJECTS)

/* The slot is read directly: a look-up by name takes a tenth of a put. */
static PyObject *method_call(PyObject *method, PyObject *const *args, size_t nargsf, PyObject *names)
{
    PutMethod *self = (PutMethod *)method;
    Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
    if (nargs && self->owner && is_a(args[0], (PyTypeObject *)self->owner)) {
        PyObject *sender = *(PyObject **)((char *)args[0] + self->slot->d_member->offset), *receipt = NULL;
        if (sender && Py_IS_TYPE(sender, &SenderType)) {
            Py_INCREF(sender);
            receipt = sender_put((Sender *)sender, args + 1, nargs - 1, names);
            Py_DECREF(sender);
        }
        if (receipt || PyErr_Occurred())
            return receipt;
    }
    return PyObject_Vectorcall(self->function, args, nargsf, names);
}

static PyObject *method_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"function", NULL};
    PyObject *function;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &function))
        return NULL;
    PutMethod *self = (PutMethod *)type->tp_alloc(type, 0);
    if (self) {
        self->call = method_call;
        self->function = Py_NewRef(function);
    }
    return (PyObject *)self;
}

static PyObject *method_get(PyObject *method, PyObject *object, PyObject *type)
{
    return object ? PyMethod_New(method, object) : Py_NewRef(method);
}

/* __set_name__(class, name): find the slot `_sender` of the class. */
static PyObject *method_set_name(PyObject *method, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *slot = has_arguments("__set_name__", nargs, 2) ? PyObject_GetAttr(args[0], name__sender) : NULL;
    if (!slot)
        return NULL;
    if (!Py_IS_TYPE(slot, &PyMemberDescr_Type) || ((PyMemberDescrObject *)slot)->d_member->type != T_OBJECT_EX ||
        !PyType_Check(args[0]) || !PyType_IsSubtype((PyTypeObject *)args[0], PyDescr_TYPE(slot))) {
        Py_DECREF(slot);
        return PyErr_Format(PyExc_TypeError, "%R has no slot _sender", args[0]);
    }
    Py_XSETREF(((PutMethod *)method)->slot, (PyMemberDescrObject *)slot);
    Py_XSETREF(((PutMethod *)method)->owner, Py_NewRef(args[0]));
    Py_RETURN_NONE;
}

static PyMethodDef method_methods[] = {
    {"__set_name__", (PyCFunction)(void (*)(void))method_set_name, METH_FASTCALL, NULL},
    {NULL},
};

static PyGetSetDef method_attributes[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL},
};

PyTypeObject PutMethodType = {
    COLLECTED_TYPE(method, PutMethod, method_new, | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR),
    .tp_doc = "The method `put` of a class: by the Sender in the slot `_sender` of its object, otherwise by a function.",
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(PutMethod, call),
    .tp_dictoffset = offsetof(PutMethod, attributes),
    .tp_descr_get = method_get,
    .tp_methods = method_methods,
    .tp_getset = method_attributes,
};
