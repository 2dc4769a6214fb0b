import java.lang.reflect.Method;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** RocketMQ's own clients, 4.9 and 5.x, against the server at args[0]. Prints a line "ok NAME" or "FAILED NAME: why" for
    each scenario that the other arguments name, or for all. */
public class Clients {
    static String server;
    static DefaultMQProducer producer;
    static Set<String> wanted;

    public static void main(String[] args) throws Exception {
        server = args[0];
        wanted = Set.of(args);
        producer = new DefaultMQProducer("producers");
        producer.setNamesrvAddr(server);
        producer.start();
        scenario("send", Clients::send);
        scenario("push", Clients::push);
        scenario("filters", Clients::filters);
        scenario("delay", Clients::delay);
        scenario("retry", Clients::retry);
        scenario("order", Clients::order);
        scenario("poison", Clients::poison);
        scenario("broadcast", Clients::broadcast);
        scenario("litepull", Clients::litePull);
        scenario("transactions", Clients::transactions);
        scenario("members", Clients::members);
        scenario("pull", Clients::pull);
        scenario("namespace", Clients::namespace);
        scenario("trace", Clients::trace);
        try { // compiled only for clients of 5.x
            Class.forName("Clients5").getDeclaredMethod("scenarios").invoke(null);
        } catch (ClassNotFoundException older) {
            scenario("requests", Clients::requests); // `request` of 5.3.3 gives up at once, at any broker
        }
        System.exit(0);
    }

    static void scenario(String name, Callable<String> run) {
        if (wanted.size() > 1 && !wanted.contains(name)) return;
        try {
            String wrong = run.call();
            System.out.println(wrong == null ? "ok " + name : "FAILED " + name + ": " + wrong);
        } catch (Throwable error) {
            System.out.println("FAILED " + name + ": " + error);
            error.printStackTrace();
        }
    }

    static boolean until(int seconds, Callable<Boolean> done) throws Exception {
        long end = System.nanoTime() + seconds * 1_000_000_000L;
        while (!done.call()) {
            if (System.nanoTime() > end) return false;
            Thread.sleep(20);
        }
        return true;
    }

    static Message message(String topic, String tag, String body) {
        return new Message(topic, tag, body.getBytes(StandardCharsets.UTF_8));
    }

    static String text(MessageExt message) {
        return new String(message.getBody(), StandardCharsets.UTF_8);
    }

    static DefaultMQPushConsumer consumer(String group, String instance) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(server);
        consumer.setInstanceName(instance);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        return consumer;
    }

    /** Start a consumer that collects the texts it gets. */
    static List<String> collect(DefaultMQPushConsumer consumer) throws Exception {
        List<String> seen = Collections.synchronizedList(new ArrayList<>());
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) seen.add(text(message));
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        return seen;
    }

    static String send() throws Exception {
        if (producer.send(message("sends", "a", "sync")).getSendStatus() != SendStatus.SEND_OK) return "sync";
        CountDownLatch sent = new CountDownLatch(100);
        for (int i = 0; i < 100; i++) {
            producer.send(message("sends", "a", "async" + i), new SendCallback() {
                public void onSuccess(SendResult result) { sent.countDown(); }
                public void onException(Throwable error) { error.printStackTrace(); }
            });
        }
        if (!sent.await(20, TimeUnit.SECONDS)) return sent.getCount() + " asynchronous sends are missing";
        for (int i = 0; i < 10; i++) producer.sendOneway(message("sends", "a", "oneway" + i));
        List<Message> batch = new ArrayList<>();
        for (int i = 0; i < 20; i++) batch.add(message("sends", "b", "batch" + i));
        if (producer.send(batch).getSendStatus() != SendStatus.SEND_OK) return "batch";
        byte[] large = new byte[200_000]; // the client compresses it
        if (producer.send(new Message("sends", "large", large)).getSendStatus() != SendStatus.SEND_OK) return "large";
        return null;
    }

    static String push() throws Exception {
        DefaultMQPushConsumer consumer = consumer("push", "one");
        consumer.subscribe("sends", "*");
        List<String> seen = collect(consumer);
        if (!until(30, () -> seen.size() >= 132)) return seen.size() + " of 132";
        if (Collections.max(seen, (a, b) -> a.length() - b.length()).length() != 200_000) return "the large body differs";
        producer.send(message("sends", "a", "while it waits"));
        if (!until(10, () -> seen.contains("while it waits"))) return "a waiting pull was not answered";
        consumer.shutdown();
        return seen.size() == 133 ? null : "duplicates: " + seen.size();
    }

    static String filters() throws Exception {
        for (int i = 0; i < 9; i++) {
            Message message = message("filters", "t" + i % 3, "m" + i);
            message.putUserProperty("n", String.valueOf(i));
            producer.send(message);
        }
        DefaultMQPushConsumer tags = consumer("tags", "one");
        tags.subscribe("filters", "t1 || t2");
        List<String> byTag = collect(tags);
        DefaultMQPushConsumer sql = consumer("sql", "one");
        sql.subscribe("filters", MessageSelector.bySql("n > 6 AND TAGS <> 't1'"));
        List<String> bySql = collect(sql);
        until(20, () -> byTag.size() >= 6 && bySql.size() >= 2);
        Thread.sleep(300);
        tags.shutdown();
        sql.shutdown();
        Collections.sort(byTag);
        Collections.sort(bySql);
        boolean right = byTag.equals(List.of("m1", "m2", "m4", "m5", "m7", "m8")) && bySql.equals(List.of("m8"));
        return right ? null : byTag + " " + bySql;
    }

    static String delay() throws Exception {
        Message later = message("delays", "a", "later");
        later.setDelayTimeLevel(2); // 5 s
        DefaultMQPushConsumer consumer = consumer("delays", "one");
        consumer.subscribe("delays", "*");
        long begin = System.nanoTime();
        producer.send(later);
        List<String> seen = collect(consumer);
        boolean came = until(30, () -> !seen.isEmpty());
        consumer.shutdown();
        if (!came) return "not delivered";
        return System.nanoTime() - begin >= 4_990_000_000L ? null : "too early";
    }

    static String retry() throws Exception {
        List<Integer> attempts = Collections.synchronizedList(new ArrayList<>());
        DefaultMQPushConsumer consumer = consumer("retries", "one");
        consumer.subscribe("retries", "*");
        consumer.setMaxReconsumeTimes(1);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            attempts.add(messages.get(0).getReconsumeTimes());
            context.setDelayLevelWhenNextConsume(1);
            return ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        producer.send(message("retries", "a", "bad"));
        consumer.start();
        DefaultMQPushConsumer dead = consumer("undertaker", "one");
        dead.subscribe("%DLQ%retries", "*");
        if (!until(30, () -> attempts.size() == 2)) return "attempts " + attempts;
        List<String> letters = collect(dead);
        boolean came = until(60, () -> letters.contains("bad"));
        consumer.shutdown();
        dead.shutdown();
        return came && attempts.equals(List.of(0, 1)) ? null : attempts + " " + letters;
    }

    static String order() throws Exception {
        for (int i = 0; i < 60; i++) {
            int key = i % 3;
            producer.send(message("order", "a", key + ":" + i), (queues, m, k) -> queues.get((Integer) k), key);
        }
        Map<String, List<Integer>> seen = new ConcurrentHashMap<>();
        Set<String> refused = ConcurrentHashMap.newKeySet();
        List<DefaultMQPushConsumer> members = new ArrayList<>();
        for (String name : List.of("one", "two")) {
            DefaultMQPushConsumer member = consumer("order", name);
            member.subscribe("order", "*");
            member.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                if (text(messages.get(0)).equals("1:1") && refused.add("1:1"))
                    return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
                for (MessageExt message : messages) {
                    String[] parts = text(message).split(":");
                    seen.computeIfAbsent(parts[0], k -> Collections.synchronizedList(new ArrayList<>()))
                        .add(Integer.parseInt(parts[1]));
                }
                return ConsumeOrderlyStatus.SUCCESS;
            });
            member.start();
            members.add(member);
        }
        // A 4.9 client asks again for a lock that was refused 20 s later.
        boolean all = until(90, () -> seen.values().stream().mapToInt(List::size).sum() >= 60);
        for (DefaultMQPushConsumer member : members) member.shutdown();
        if (!all) return "not all: " + seen;
        for (List<Integer> numbers : seen.values()) {
            List<Integer> sorted = new ArrayList<>(numbers);
            Collections.sort(sorted);
            if (!sorted.equals(numbers)) return "out of order: " + numbers;
        }
        return null;
    }

    static String poison() throws Exception {
        producer.send(message("poison", "a", "bad"), (queues, m, k) -> queues.get(0), 0);
        producer.send(message("poison", "a", "good"), (queues, m, k) -> queues.get(0), 0);
        List<Integer> attempts = Collections.synchronizedList(new ArrayList<>());
        List<String> good = Collections.synchronizedList(new ArrayList<>());
        DefaultMQPushConsumer consumer = consumer("poison", "one");
        consumer.setMaxReconsumeTimes(2);
        consumer.setSuspendCurrentQueueTimeMillis(50);
        consumer.subscribe("poison", "*");
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            if (text(messages.get(0)).equals("bad")) {
                attempts.add(messages.get(0).getReconsumeTimes());
                return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
            }
            good.add(text(messages.get(0)));
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        DefaultMQPushConsumer dead = consumer("poisoned", "one");
        if (!until(60, () -> !good.isEmpty())) return "the queue is blocked: " + attempts;
        dead.subscribe("%DLQ%poison", "*");
        List<String> letters = collect(dead);
        boolean came = until(30, () -> letters.equals(List.of("bad")));
        consumer.shutdown();
        dead.shutdown();
        return came && attempts.equals(List.of(0, 1, 2)) ? null : attempts + " " + letters;
    }

    static String broadcast() throws Exception {
        producer.send(message("news", "a", "first"));
        List<List<String>> seen = new ArrayList<>();
        List<DefaultMQPushConsumer> members = new ArrayList<>();
        for (String name : List.of("one", "two")) {
            DefaultMQPushConsumer member = consumer("news" + System.nanoTime(), name); // it keeps its offsets in a file
            for (Method method : DefaultMQPushConsumer.class.getMethods()) {
                if (!method.getName().equals("setMessageModel")) continue; // its class has moved since 4.9
                for (Object model : method.getParameterTypes()[0].getEnumConstants())
                    if (model.toString().equals("BROADCASTING")) method.invoke(member, model);
            }
            member.subscribe("news", "*");
            seen.add(collect(member));
            members.add(member);
        }
        for (int i = 0; i < 10; i++) producer.send(message("news", "a", "n" + i));
        boolean all = until(30, () -> seen.get(0).size() == 11 && seen.get(1).size() == 11);
        for (DefaultMQPushConsumer member : members) member.shutdown();
        return all ? null : seen.toString();
    }

    static String litePull() throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("lite");
        consumer.setNamesrvAddr(server);
        consumer.setAutoCommit(false);
        consumer.start();
        List<MessageQueue> queues = new ArrayList<>(consumer.fetchMessageQueues("sends"));
        consumer.assign(queues);
        for (MessageQueue queue : queues) consumer.seekToBegin(queue);
        AtomicInteger polled = new AtomicInteger();
        boolean all = until(30, () -> polled.addAndGet(consumer.poll(200).size()) >= 133);
        consumer.commitSync();
        consumer.shutdown();
        return all ? null : polled + " of 133";
    }

    @SuppressWarnings("deprecation")
    static String pull() throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("pull");
        consumer.setNamesrvAddr(server);
        consumer.start();
        long before = System.currentTimeMillis() - 1;
        for (int i = 0; i < 50; i++) producer.send(message("pulls", "t" + i % 2, "m" + i));
        int pulled = 0, tagged = 0;
        for (MessageQueue queue : consumer.fetchSubscribeMessageQueues("pulls")) {
            long end = consumer.maxOffset(queue), next = consumer.minOffset(queue);
            if (next != 0 || consumer.searchOffset(queue, before) != 0) return "a queue begins at " + next;
            while (next < end) {
                PullResult found = consumer.pull(queue, "*", next, 8);
                pulled += found.getMsgFoundList().size();
                next = found.getNextBeginOffset();
            }
            PullResult some = consumer.pull(queue, "t1", 0, 32);
            tagged += some.getMsgFoundList() == null ? 0 : some.getMsgFoundList().size();
            if (consumer.pull(queue, "*", end, 8).getPullStatus() != PullStatus.NO_NEW_MSG) return "something after the end";
            consumer.updateConsumeOffset(queue, next);
            consumer.getOffsetStore().persist(queue);
        }
        for (MessageQueue queue : consumer.fetchSubscribeMessageQueues("pulls"))
            if (!until(10, () -> consumer.fetchConsumeOffset(queue, true) == consumer.maxOffset(queue))) return "not committed";
        consumer.shutdown();
        return pulled == 50 && tagged == 25 ? null : pulled + " and " + tagged;
    }

    static String requests() throws Exception {
        DefaultMQPushConsumer consumer = consumer("servants", "one");
        consumer.subscribe("requests", "*");
        producer.send(message("requests", "a", "none")); // so that the topic is there
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            try {
                for (MessageExt message : messages)
                    if (message.getProperty("CORRELATION_ID") != null)
                        producer.send(MessageUtil.createReplyMessage(message, ("re: " + text(message)).getBytes()));
            } catch (Exception error) {
                error.printStackTrace();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        Message reply = producer.request(message("requests", "a", "hello"), 20_000);
        consumer.shutdown();
        String text = new String(reply.getBody(), StandardCharsets.UTF_8);
        return text.equals("re: hello") ? null : text;
    }

    @SuppressWarnings("deprecation")
    static String namespace() throws Exception {
        DefaultMQProducer spaced = new DefaultMQProducer("spaced");
        spaced.setNamesrvAddr(server);
        spaced.setNamespace("ns");
        spaced.start();
        DefaultMQPushConsumer consumer = consumer("spaced", "ns"), outside = consumer("spaced", "outside");
        consumer.setNamespace("ns");
        consumer.subscribe("spaces", "*");
        spaced.send(message("spaces", "a", "inside"));
        producer.send(message("spaces", "a", "outside"));
        List<Integer> attempts = Collections.synchronizedList(new ArrayList<>());
        List<String> seen = Collections.synchronizedList(new ArrayList<>());
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            attempts.add(messages.get(0).getReconsumeTimes());
            context.setDelayLevelWhenNextConsume(1);
            if (attempts.size() == 1) return ConsumeConcurrentlyStatus.RECONSUME_LATER;
            for (MessageExt message : messages) seen.add(message.getTopic() + " " + text(message));
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        outside.subscribe("spaces", "*");
        List<String> others = collect(outside);
        until(40, () -> seen.size() >= 1 && others.size() >= 1);
        Thread.sleep(300);
        for (DefaultMQPushConsumer member : List.of(consumer, outside)) member.shutdown();
        spaced.shutdown();
        boolean right = seen.equals(List.of("spaces inside")) && attempts.equals(List.of(0, 1)) && others.equals(List.of("outside"));
        return right ? null : seen + " " + attempts + " " + others;
    }

    static String trace() throws Exception {
        DefaultMQProducer traced = new DefaultMQProducer("traced", null, true, null);
        traced.setNamesrvAddr(server);
        traced.setInstanceName("traced");
        traced.start();
        SendResult sent = traced.send(message("traced", "a", "seen"));
        DefaultMQPushConsumer consumer = consumer("tracers", "one");
        consumer.subscribe("RMQ_SYS_TRACE_TOPIC", "*");
        List<String> seen = collect(consumer);
        boolean came = until(60, () -> seen.toString().contains(sent.getMsgId()));
        traced.shutdown();
        consumer.shutdown();
        return came ? null : seen.toString();
    }

    static String transactions() throws Exception {
        TransactionMQProducer till = new TransactionMQProducer("till");
        till.setNamesrvAddr(server);
        AtomicInteger checks = new AtomicInteger();
        till.setTransactionListener(new TransactionListener() {
            public LocalTransactionState executeLocalTransaction(Message message, Object state) {
                return (LocalTransactionState) state;
            }
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                checks.incrementAndGet();
                boolean ours = text(message).equals("unknown") && message.getTopic().equals("paid");
                return ours ? LocalTransactionState.COMMIT_MESSAGE : LocalTransactionState.ROLLBACK_MESSAGE;
            }
        });
        till.start();
        DefaultMQPushConsumer consumer = consumer("paid", "one");
        consumer.subscribe("paid", "*");
        till.sendMessageInTransaction(message("paid", "a", "commit"), LocalTransactionState.COMMIT_MESSAGE);
        till.sendMessageInTransaction(message("paid", "a", "rollback"), LocalTransactionState.ROLLBACK_MESSAGE);
        till.sendMessageInTransaction(message("paid", "a", "unknown"), LocalTransactionState.UNKNOW);
        List<String> seen = collect(consumer);
        boolean all = until(60, () -> seen.size() >= 2); // the first check comes after six seconds
        till.shutdown();
        consumer.shutdown();
        Collections.sort(seen);
        return all && seen.equals(List.of("commit", "unknown")) && checks.get() == 1 ? null : seen + " " + checks;
    }

    static String members() throws Exception {
        Set<String> workers = ConcurrentHashMap.newKeySet();
        List<String> seen = new CopyOnWriteArrayList<>(); // it is read while it grows
        List<DefaultMQPushConsumer> members = new ArrayList<>();
        producer.send(message("shared", "a", "first"));
        for (String name : List.of("one", "two", "three")) {
            DefaultMQPushConsumer member = consumer("members", name);
            member.subscribe("shared", "*");
            member.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                workers.add(name);
                for (MessageExt message : messages) seen.add(text(message));
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
            member.start();
            members.add(member);
        }
        until(30, () -> !seen.isEmpty());
        Thread.sleep(3000); // until the queues are divided
        for (int i = 0; i < 300; i++) producer.send(message("shared", "a", "m" + i));
        boolean all = until(30, () -> Set.copyOf(seen).size() == 301);
        long before = seen.stream().filter(text -> text.startsWith("m")).count(); // "first" may move with its queue
        members.remove(0).shutdown();
        for (int i = 0; i < 40; i++) producer.send(message("shared", "a", "after" + i));
        all &= until(60, () -> Set.copyOf(seen).size() == 341);
        for (DefaultMQPushConsumer member : members) member.shutdown();
        return all && before == 300 && workers.size() == 3 ? null : Set.copyOf(seen).size() + " " + before + " " + workers;
    }
}
