/* The numbers that C shares with Python, written by `make docs`; don't edit them. */

/* mqstore.layout.hosts */
#define IPV4_BYTES 8
#define IPV6_BYTES 20

/* mqstore.layout.properties */
#define MAX_PROPERTIES_BYTES 32767
#define CRC_TAIL_BYTES 20

/* mqstore.layout.record */
#define MAGIC_V1 -626843481
#define MAGIC_V2 -626843477
#define MAGIC_BLANK -875286124
#define MAGIC_AT 4
#define CHECKSUM_AT 8
#define QUEUE_ID_AT 12
#define FLAG_AT 16
#define QUEUE_OFFSET_AT 20
#define PHYSICAL_OFFSET_AT 28
#define SYS_FLAG_AT 36
#define BORN_TIMESTAMP_AT 40
#define BORN_HOST_AT 48
#define BODY_LENGTH_BYTES 4
#define PROPERTIES_LENGTH_BYTES 2
#define STORE_TIMESTAMP_AT_V4 56
#define STORE_HOST_AT_V4 64
#define RECONSUME_TIMES_AT_V4 72
#define PREPARED_OFFSET_AT_V4 76
#define BODY_LENGTH_AT_V4 84
#define BODY_AT_V4 88
#define IPV6_EXTRA 12
#define COMPRESSED 1
#define TRANSACTION_MASK 12
#define TRANSACTION_COMMIT 8
#define TRANSACTION_ROLLBACK 12
#define BORN_HOST_V6 16
#define STORE_HOST_V6 32
#define INNER_BATCH 128
#define COMPRESSION_ZLIB 768
#define BODY_ELSEWHERE 1793
#define MIN_RECORD_BYTES 91
#define BLANK_BYTES 8

/* mqstore.layout.consumequeue */
#define UNIT_BYTES 20
#define UNIT_SIZE_AT 8
#define UNIT_TAGS_CODE_AT 12
#define VOID_SIZE 2147483647
#define LAST_ADDRESS -2147483649

/* mqstore.layout.indexfile */
#define HEADER_BYTES 40
#define SLOT_BYTES 4
#define ENTRY_BYTES 20
#define BEGIN_TIMESTAMP_AT 0
#define END_TIMESTAMP_AT 8
#define BEGIN_OFFSET_AT 16
#define END_OFFSET_AT 24
#define USED_SLOTS_AT 32
#define NEXT_ENTRY_AT 36
#define ENTRY_HASH_AT 0
#define ENTRY_OFFSET_AT 4
#define ENTRY_SECONDS_AT 12
#define ENTRY_PREVIOUS_AT 16
#define SECOND_MS 1000

/* mqstore.log.writing.outgoing */
#define MAX_MESSAGE_GROUP 63

/* mqstore.broker.pop.batch */
#define SAME_MOMENT_MS 1000

/* mqstore.broker.pop.state */
#define MAX_BATCH 32
#define COMPACT_FROM 1024
